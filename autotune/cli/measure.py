"""``autotune measure``."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from autotune.cli.types import (
    Duration,
    latency_params,
    lengths_params,
    server_params,
    studies_option,
    workload_params,
)
from autotune.cli.wiring import (
    device_list,
    flag_values,
    latency_options,
    probe_options,
    study_spec,
    workload_options,
    write_json,
    write_out,
)
from autotune.errors import InputError, NothingStableError
from autotune.records.codec import RecordError, dumps, encode, loads
from autotune.records.trial import ConcurrencyPlan, TrialResult, TrialTask
from autotune.report.tables import why


@click.command()
@server_params
@workload_params
@lengths_params
@latency_params
@studies_option
@click.option("--set", "flags", multiple=True, metavar="FLAG=VALUE", help="A server flag: --set max_num_seqs=256.")
@click.option(
    "--concurrency",
    type=click.IntRange(min=1),
    multiple=True,
    help="In flight; several are measured in order. [default: climb]",
)
@click.option("--window", type=Duration(), help="Shortest measuring window. [default: 20s]")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), help="Keep logs here.")
@click.option(
    "--task",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Run a TrialTask record (JSON) as it is; prints a TrialResult.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of text.")
def measure(task: Path | None, as_json: bool, **options: Any) -> None:
    """Start one server, measure it, stop it.

    With --task FILE the whole task comes from a record and the whole result is printed: this is what a search
    runs on another node. Exit 3 when the setting failed or was not stable.

    \b
    autotune measure --model Qwen/Qwen3-32B --set tensor_parallel_size=8 --concurrency 64 --concurrency 160
    autotune measure --task task.json
    """
    from autotune.report.live import Progress
    from autotune.search.trial import run_trial

    record = _read_task(task) if task is not None else _task(options)
    progress = Progress(sys.stderr)
    try:
        result = run_trial(record, emit=progress)
    finally:
        progress.close()
    if task is not None:
        write_out(dumps(result) + "\n", None)
        return
    if result.lengths is not None and record.folder is not None:
        write_out(dumps(result.lengths) + "\n", Path(record.folder) / "lengths.json")
    if as_json:
        write_json(measure_data(result))
    else:
        _tell(result)
    if result.best is None:
        raise NothingStableError(
            f"not measured: {why(result) or result.state}", hint=None if result.failure is None else result.failure.hint
        )


def measure_data(result: TrialResult) -> dict[str, Any]:
    """The object of ``measure --json``: the best load, or the last one where none was good."""
    load = result.measurement or (result.loads[-1] if result.loads else None)
    data = {} if load is None else encode(load)
    kept = (
        "concurrency", "valid", "invalid_reasons", "stable", "violations", "output_tokens_per_s", "paired_low",
        "paired_high", "low", "high", "kv_usage_mean", "kv_usage_max", "preemptions", "truncated_share",
        "failed_requests", "bottleneck",
    )  # fmt: skip
    return {
        "schema": "autotune/measure/1",
        "settings": result.settings.to_data(),
        **{key: data.get(key) for key in kept},
        "startup_s": result.startup_s,
        "window_s": data.get("window_s"),
        "failure": encode(result.failure),
    }


def _tell(result: TrialResult) -> None:
    for load in result.loads:
        rate = "no rate" if load.output_tokens_per_s is None else f"{load.output_tokens_per_s:,.0f} output tokens/s"
        kv = "" if load.kv_usage_max is None else f", KV {load.kv_usage_max:.0%}"
        click.echo(f"{load.concurrency} in flight: {load.outcome}, {rate}{kv}, {load.failed_requests} failed")
    best = result.measurement
    if best is not None:
        click.echo(f"best: {best.output_tokens_per_s:,.0f} output tokens/s at {best.concurrency} in flight")


def _read_task(path: Path) -> TrialTask:
    try:
        return loads(TrialTask, path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read task {path}: {error.strerror}") from None
    except (RecordError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is no TrialTask record: {error}", hint="docs/schemas/ has its JSON Schema") from None


def _task(options: dict[str, Any]) -> TrialTask:
    from autotune.search.folder import StudyFolder
    from autotune.search.known_lengths import study_lengths

    spec = study_spec(
        None,
        {
            **{key: options[key] for key in ("model", "engine", "gpus", "vllm_command", "lengths", "real_time")},
            "devices": device_list(options["devices"]),
            "fixed": flag_values(options["flags"]),
            "probe": probe_options(options["probe_limit"], options["probe_time"]),
            "measure": latency_options(options["max_ttft"], options["max_tpot"]),
            "workload": workload_options(
                options["workload"],
                options["dataset_path"],
                options["max_tokens"],
                options["limit"],
                options["official_prompt"],
            ),
        },
    )
    engine = spec.engine_spec()
    window_s = options["window"] or spec.measure.window_s
    folder = options["folder"]
    known = study_lengths(spec, StudyFolder(options["studies"] / spec.study_name))
    if known.text is not None:
        click.echo(known.text, err=True)
    return TrialTask(
        number=0,
        kind="measure",
        settings=engine.fixed,
        engine=engine,
        workload=spec.workload,
        measure=replace(spec.measure, window_s=window_s, window_limit_s=max(window_s, spec.measure.window_limit_s)),
        concurrency=ConcurrencyPlan(values=options["concurrency"]),
        folder=None if folder is None else str(folder),
        lengths=known.lengths,
        law=known.law,
        probe=spec.probe if spec.probe.questions else None,
    )
