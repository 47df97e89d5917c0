"""Read the series of a run under way: a vLLM log, saved /metrics pages, or a CSV of anyone's."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path

from autotune.engines.scrape import Metrics, kv_capacity_tokens, page_kind, parse
from autotune.engines.serverlog import iter_samples, read_log
from autotune.engines.statsline import StatsLine
from autotune.errors import InputError
from autotune.evaluation.follow_series import USUAL_SPAN_S, Reading, RunSeries, with_spans
from autotune.evaluation.follow_tables import (
    BIN,
    ENDED,
    HINT,
    OUTPUT,
    TIME,
    TOTAL,
    Completions,
    column,
    read_completions,
    read_table,
    rows_of,
)
from autotune.records.codec import decode

ONE_TICK_S = 3.0
"""Lines of different engines so close together belong to one tick."""


def read_series(paths: Sequence[Path]) -> RunSeries | Completions:
    """Whatever the files hold.

    Raises:
        InputError: a file cannot be read, is of no known kind, or shows no load.
    """
    if len(paths) > 1:
        return _pages(paths)
    path = paths[0]
    try:
        with path.open("rb") as file:
            head = file.read(65536).decode("utf-8", "replace")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}", hint=HINT) from error
    lines = [line.strip() for line in head.lstrip("\ufeff").splitlines() if line.strip() and line.lstrip()[:1] != "#"]
    first = lines[0] if lines else ""
    if first.startswith("{") and '"generation_tokens_total"' in first:
        return _scrapes(path)
    columns = [c.strip().strip('"').lower() for c in re.split(r"[,;\t]", first)]
    if len(columns) > 1 and column(columns, TIME) and column(columns, OUTPUT):
        return read_table(rows_of(path, first))
    if len(columns) > 1 and column(columns, BIN) and column(columns, (*ENDED, TOTAL)):
        return read_completions(rows_of(path, first), path)
    if page_kind(head) == "vllm" and "throughput:" not in head:
        return _pages(paths)
    return _log(path)


def _log(path: Path) -> RunSeries:
    capacity = read_log(path).kv_capacity_tokens
    lines = [line for line in iter_samples(path) if line.t_s is not None]
    if not lines:
        raise InputError(f"{path}: no stats line with a time stamp", hint=HINT)
    readings: list[Reading] = []
    starts: list[float] = []
    engines, server = 1, lines[0].server
    for tick in _ticks(lines):
        t_s = max(line.t_s or 0.0 for line in tick)
        if tick[0].server != server:
            server = tick[0].server
            starts.append(t_s)
        engines = max(engines, sum(line.engines for line in tick))
        gap = t_s - readings[-1].t_s if readings and not (starts and starts[-1] == t_s) else USUAL_SPAN_S
        readings.append(_reading_of(tick, t_s, gap))
    return with_spans(
        RunSeries(
            readings=tuple(readings),
            source="log",
            engines=engines,
            kv_capacity_tokens=capacity,
            life_starts=tuple(starts),
        )
    )


def _ticks(lines: Iterable[StatsLine]) -> Iterable[list[StatsLine]]:
    """Lines of one moment: different engines, close together."""
    tick: list[StatsLine] = []
    for line in lines:
        keys = {(seen.source, seen.engine) for seen in tick}
        late = tick and (line.t_s or 0.0) - (tick[0].t_s or 0.0) > ONE_TICK_S
        if tick and ((line.source, line.engine) in keys or late or line.server != tick[0].server):
            yield tick
            tick = []
        tick.append(line)
    if tick:
        yield tick


def _reading_of(tick: Sequence[StatsLine], t_s: float, span_s: float) -> Reading:
    """Sums over engines; rates are turned into counts by ``with_spans`` once the usual interval is known."""
    return Reading(
        t_s=t_s,
        span_s=span_s,
        output_tokens=sum(line.output_tokens_per_s for line in tick),
        running=sum(line.running or 0 for line in tick),
        waiting=sum((line.waiting or 0) + (line.swapped or 0) for line in tick),
        kv_usage=statistics.fmean(line.kv_usage for line in tick),
        kv_highest=max(line.kv_usage for line in tick),
        prompt_tokens=sum(line.prompt_tokens_per_s for line in tick),
    )


def _scrapes(path: Path) -> RunSeries:
    pages: list[tuple[float, Metrics]] = []
    for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(keepends=True), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            if data.get("running") is None or data.get("generation_tokens_total") is None:
                continue  # the server did not answer
            known = {field.name: data.get(field.name) for field in dataclasses.fields(Metrics)}
            pages.append((float(data["t"]), decode(Metrics, known)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, json.JSONDecodeError) and not line.endswith("\n"):
                break  # the last line is being written
            raise InputError(
                f"{path}, line {number}: not a line of `autotune scrape --write` ({error})", hint=HINT
            ) from error
    return _of_counters(pages, None, str(path))


def _pages(paths: Sequence[Path]) -> RunSeries:
    """Saved pages; their times are the numbers that end their names, where all names have one, else when they were
    written."""
    texts = []
    for path in paths:
        try:
            texts.append(path.read_bytes().decode("utf-8", "replace"))
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}", hint=HINT) from error
        if page_kind(texts[-1]) != "vllm":
            raise InputError(f"{path} is not a page of a vLLM server", hint=HINT)
    numbers = [re.search(r"(\d+(?:\.\d+)?)$", path.stem) for path in paths]
    named = [float(n[1]) for n in numbers if n]
    times = named if len(set(named)) == len(paths) else [path.stat().st_mtime for path in paths]
    order = sorted(range(len(paths)), key=lambda i: times[i])
    pages = [(times[i], parse(texts[i])) for i in order]
    return _of_counters(pages, kv_capacity_tokens(texts[order[-1]]), str(paths[0]))


def _of_counters(pages: Sequence[tuple[float, Metrics]], capacity: int | None, source: str) -> RunSeries:
    if len(pages) < 2:
        raise InputError(f"{source}: one page says nothing of speed, at least two are needed", hint=HINT)
    readings, starts = [], []
    for (before_s, before), (t_s, now) in itertools.pairwise(pages):
        span = t_s - before_s
        written = (now.generation_tokens_total or 0) - (before.generation_tokens_total or 0)
        if span <= 0:
            continue
        if written < 0:
            starts.append(t_s)  # counters went back: another server
            written = now.generation_tokens_total or 0
        prompts = None
        if now.prompt_tokens_total is not None and before.prompt_tokens_total is not None:
            prompts = float(max(0, now.prompt_tokens_total - before.prompt_tokens_total))
        readings.append(
            Reading(
                t_s=t_s,
                span_s=span,
                output_tokens=float(written),
                running=float(now.running or 0),
                waiting=float(now.waiting or 0),
                kv_usage=now.kv_usage_max,
                kv_highest=now.kv_usage_max,
                prompt_tokens=prompts,
            )
        )
    engines = max((m.engines or 1 for _, m in pages), default=1)
    return RunSeries(
        readings=tuple(readings),
        source="metrics",
        engines=engines,
        kv_capacity_tokens=capacity,
        life_starts=tuple(starts),
    )
