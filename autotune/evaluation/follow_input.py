"""Read the series of a run under way: a vLLM log, saved /metrics pages, or a CSV of anyone's."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.engines.scrape import Metrics, kv_capacity_tokens, page_kind, parse
from autotune.engines.serverlog import iter_samples, read_log
from autotune.engines.statsline import StatsLine
from autotune.errors import InputError
from autotune.evaluation.follow_series import Reading, RunSeries

USUAL_SPAN_S = 10.0
"""vLLM's interval between stats lines."""
ONE_TICK_S = 3.0
"""Lines of different engines so close together belong to one tick."""
HINT = "give a vLLM server log, the JSON lines of `autotune scrape --write`, saved pages, or a CSV with t_s, gen_tps, running, waiting, kv_pct"

TIME = ("t_s", "time_s", "elapsed_s", "seconds", "time", "t")
OUTPUT = ("gen_tps", "output_tokens_per_s", "generation_tps", "generation_tokens_per_s", "gen_tokens_per_s")
PROMPT = ("prompt_tps", "prompt_tokens_per_s")
KV = ("kv_pct", "kv_percent", "kv_usage", "kv_cache_usage", "gpu_cache_usage")
ENDED = ("http200_before_this_line", "completions", "completed", "finished", "finished_requests")
BIN = ("bin_start_s", "bin_s", *TIME)


@dataclass(frozen=True, kw_only=True)
class Completions:
    """Answers that ended, by time, as a client saw them: nothing else is known."""

    times_s: tuple[float, ...]
    """Ends of the bins, seconds from the first send."""
    counts: tuple[float, ...]


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
    if len(columns) > 1 and _column(columns, TIME) and _column(columns, OUTPUT):
        return _table(_rows(path, first))
    if len(columns) > 1 and _column(columns, BIN) and _column(columns, (*ENDED, "cumulative")):
        return _completions(_rows(path, first), path)
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
    return _spanned(
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
    """Sums over engines; rates are turned into counts by ``_spanned`` once the usual interval is known."""
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


def _spanned(series: RunSeries) -> RunSeries:
    """Rates times spans; a span is never longer than the usual interval by much (lines vanish while idle)."""
    gaps = [b.t_s - a.t_s for a, b in itertools.pairwise(series.readings) if b.t_s > a.t_s]
    usual = statistics.median(gaps) if gaps else USUAL_SPAN_S
    changed = []
    for i, r in enumerate(series.readings):
        gap = r.t_s - series.readings[i - 1].t_s if i else usual
        span = gap if 0 < gap <= 1.6 * usual else usual
        changed.append(
            Reading(
                t_s=r.t_s,
                span_s=span,
                output_tokens=r.output_tokens * span,
                running=r.running,
                waiting=r.waiting,
                kv_usage=r.kv_usage,
                kv_highest=r.kv_highest,
                prompt_tokens=None if r.prompt_tokens is None else r.prompt_tokens * span,
                completions=r.completions,
            )
        )
    return RunSeries(
        readings=tuple(changed),
        source=series.source,
        engines=series.engines,
        kv_capacity_tokens=series.kv_capacity_tokens,
        life_starts=series.life_starts,
    )


def _scrapes(path: Path) -> RunSeries:
    pages: list[tuple[float, Metrics]] = []
    for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            if data.get("running") is None or data.get("generation_tokens_total") is None:
                continue  # the server did not answer
            known = {name: data.get(name) for name in Metrics.__dataclass_fields__}
            pages.append((float(data["t"]), Metrics(**known)))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{path}, line {number}: not a line of `autotune scrape --write` ({error})") from error
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


def _rows(path: Path, header: str) -> list[Mapping[str, str]]:
    text = path.read_text("utf-8-sig", "replace")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    separator = max(",;\t", key=header.count)
    rows = csv.DictReader(io.StringIO("\n".join(lines)), delimiter=separator, skipinitialspace=True)
    return [{str(k).strip().lower(): v or "" for k, v in row.items() if k is not None} for row in rows]


def _table(rows: Sequence[Mapping[str, str]]) -> RunSeries:
    """A CSV of gauges and rates; rows of several engines at one time are added up."""
    columns = list(rows[0]) if rows else []
    kv, setup = _column(columns, KV), _column(columns, ("setup", "run"))
    if setup:
        rows = [row for row in rows if row[setup] == rows[-1][setup]]
    numbers = {name: _column(columns, names) for name, names in _TABLE.items()}
    percent = kv is not None and (kv.endswith(("pct", "percent")) or max((_float(r[kv]) or 0) for r in rows) > 1.5)
    at: dict[float, list[dict[str, float | None]]] = {}
    for row in rows:
        values = {name: _float(row[c]) if c else None for name, c in numbers.items()}
        if values["t_s"] is not None and values["output"] is not None:
            at.setdefault(values["t_s"], []).append(values)
    if not at:
        raise InputError("the CSV has no row with a time and a number of output tokens per second", hint=HINT)
    readings = []
    for t_s in sorted(at):
        engines = at[t_s]
        usage = [v["kv"] / (100 if percent else 1) for v in engines if v["kv"] is not None]
        readings.append(
            Reading(
                t_s=t_s,
                span_s=USUAL_SPAN_S,
                output_tokens=_sum(engines, "output") or 0.0,
                running=_sum(engines, "running") or 0.0,
                waiting=_sum(engines, "waiting") or 0.0,
                kv_usage=statistics.fmean(usage) if usage else None,
                kv_highest=max(usage) if usage else None,
                prompt_tokens=_sum(engines, "prompt"),
                completions=_sum(engines, "ended"),
            )
        )
    return _spanned(
        RunSeries(readings=tuple(readings), source="csv", engines=max(len(engines) for engines in at.values()))
    )


_TABLE: dict[str, tuple[str, ...]] = {
    "t_s": TIME,
    "output": OUTPUT,
    "running": ("running", "num_requests_running"),
    "waiting": ("waiting", "pending", "num_requests_waiting"),
    "kv": KV,
    "prompt": PROMPT,
    "ended": ENDED,
}


def _completions(rows: Sequence[Mapping[str, str]], path: Path) -> Completions:
    columns = list(rows[0]) if rows else []
    time, ended, total = _column(columns, BIN), _column(columns, ENDED), _column(columns, ("cumulative",))
    starts: list[float] = []
    counts: list[float] = []
    before = 0.0
    for row in rows:
        at = _float(row[time]) if time else None
        count = _float(row[ended]) if ended else None
        sum_ = _float(row[total]) if total else None
        if at is None or (count is None and sum_ is None):
            continue
        value = count if count is not None else (sum_ or 0.0) - before
        before = sum_ if sum_ is not None else before + value
        starts.append(at)
        counts.append(value)
    if len(starts) < 2:
        raise InputError(f"{path}: at least two rows of completions are needed", hint=HINT)
    width = statistics.median(b - a for a, b in itertools.pairwise(starts))
    bins = time is not None and time.startswith("bin")
    ends = [at + (width if bins else 0.0) for at in starts]
    return Completions(times_s=tuple(ends), counts=tuple(counts))


def _column(columns: Sequence[str], names: Sequence[str]) -> str | None:
    return next((name for name in names if name in columns), None)


def _float(text: str | None) -> float | None:
    try:
        return float(text) if text not in (None, "") else None
    except ValueError:
        return None


def _sum(rows: Sequence[Mapping[str, float | None]], name: str) -> float | None:
    known = [value for row in rows if (value := row[name]) is not None]
    return sum(known) if known else None
