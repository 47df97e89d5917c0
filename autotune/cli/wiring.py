"""Puts the rooms together for the commands: study files and options to records, folders, locks."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from autotune.errors import InputError
from autotune.search.folder import StudyFolder, newest_study, write_whole
from autotune.spec import StudySpec, parse_study, read_study


def study_spec(study_file: Path | None, options: Mapping[str, Any]) -> StudySpec:
    """A study from a file and the options that override it.

    Args:
        study_file: TOML, or ``None``.
        options: keys of ``StudySpec``; nested ones as dictionaries; ``None`` means "not given".
    """
    data: dict[str, Any] = {}
    source = "command line"
    if study_file is not None:
        data, source = read_study(study_file).model_dump(mode="json", exclude_unset=True), str(study_file)
        data.setdefault("name", None)
    given = _without_none(options)
    if "model" not in data and "model" not in given:
        raise InputError(
            "--model is needed: which model is served?", hint="autotune search --model Qwen/Qwen3-32B --trials 20"
        )
    merged = _merge(data, given)
    workload = merged.setdefault("workload", {})
    if isinstance(workload, dict):
        workload.setdefault("name", "hle")
    return parse_study(merged, source=source)


def workload_options(
    workload: str | None,
    dataset_path: str | None,
    max_tokens: int | None,
    limit: int | None,
    official_prompt: bool | None,
) -> dict[str, Any]:
    """``--workload hle``, ``--workload FILE.jsonl`` or ``--workload -``."""
    from autotune.workloads import parse_name

    name, path = (None, None) if workload is None else parse_name(workload)
    path = path or dataset_path
    return {"name": name, "path": path, "max_tokens": max_tokens, "limit": limit, "official_prompt": official_prompt}


def probe_options(questions: int | None, limit_s: float | None) -> dict[str, Any]:
    """``--probe-limit`` and ``--probe-time``."""
    return {"questions": questions, "limit_s": limit_s}


def latency_options(ttft_s: float | None, tpot_s: float | None) -> dict[str, Any]:
    """``--max-ttft`` and ``--max-tpot``."""
    return {"max_ttft_s": ttft_s, "max_tpot_s": tpot_s}


def baseline_option(line: str, concurrency: tuple[int, ...]) -> dict[str, Any]:
    """``--baseline 'vllm serve MODEL -tp 8'`` -> a baseline section; what is chosen per server is left out."""
    from autotune.engines.flags import parse_line

    read = parse_line(line)
    if read.left_out:
        click.echo(
            f"note: of your line is left out, because it is chosen for each server: {', '.join(read.left_out)}",
            err=True,
        )
    flags = read.settings.with_(model=None).to_data()
    return {"label": "your own line", "flags": flags, "concurrency": list(concurrency or (32, 100))}


def flag_values(assignments: tuple[str, ...]) -> dict[str, Any] | None:
    """``--set max_num_seqs=256`` and the like -> settings; ``None`` when there are none."""
    from autotune.engines.flags import parse_assignment

    return dict(parse_assignment(text) for text in assignments) or None


def device_list(devices: str | None) -> list[int] | None:
    """``--devices 0,1`` -> [0, 1]."""
    if devices is None:
        return None
    try:
        return [int(part) for part in devices.split(",")]
    except ValueError:
        raise InputError(f"--devices lists GPU indices, got {devices!r}", hint="--devices 0,1") from None


def open_study(study: str | None, studies: Path) -> StudyFolder:
    """A study by name or path; the newest one when none is named (told on stderr)."""
    if study is None:
        folder = newest_study(studies)
        click.echo(f"study: {folder.path}", err=True)
        return folder
    path = Path(study) if Path(study).is_dir() else studies / study
    if not (path / "study.json").exists():
        known = sorted(p.parent.name for p in studies.glob("*/study.json"))
        raise InputError(f"there is no study {study!r} under {studies}", hint=f"known: {', '.join(known) or 'none'}")
    return StudyFolder(path)


def write_out(text: str, file: Path | None) -> None:
    """Text to stdout, or whole into a file."""
    if file is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        write_whole(file, text)
        click.echo(f"wrote {file}", err=True)


def write_json(data: Any) -> None:
    """JSON data to stdout."""
    write_out(json.dumps(data, indent=2, allow_nan=False, ensure_ascii=False) + "\n", None)


def _without_none(options: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in options.items():
        inner = _without_none(value) if isinstance(value, dict) else value
        if inner is not None and inner != {} and inner != ():
            kept[key] = inner
    return kept


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = merged.get(key)
        merged[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
