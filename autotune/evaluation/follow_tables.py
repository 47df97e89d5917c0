"""Tables of a run under way, anyone's: load by time, or nothing but the ends of answers."""

from __future__ import annotations

import csv
import io
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from autotune.errors import InputError
from autotune.evaluation.follow_series import USUAL_SPAN_S, Reading, RunSeries, with_spans

HINT = (
    "give a vLLM server log, the JSON lines of `autotune scrape --write`, saved pages, or a CSV with"
    " t_s, gen_tps, running, waiting, kv_pct"
)

TIME = ("t_s", "time_s", "elapsed_s", "seconds", "time", "t")
OUTPUT = ("gen_tps", "output_tokens_per_s", "generation_tps", "generation_tokens_per_s", "gen_tokens_per_s")
PROMPT = ("prompt_tps", "prompt_tokens_per_s")
KV = ("kv_pct", "kv_percent", "kv_usage", "kv_cache_usage", "gpu_cache_usage")
ENDED = ("http200_before_this_line", "completions", "completed", "finished", "finished_requests")
TOTAL = "cumulative"
BIN = ("bin_start_s", "bin_s", *TIME)


@dataclass(frozen=True, kw_only=True)
class Completions:
    """Answers that ended, by time, as a client saw them: nothing else is known."""

    times_s: tuple[float, ...]
    """Ends of the bins, seconds from the first send."""
    counts: tuple[float, ...]


def rows_of(path: Path, header: str) -> list[Mapping[str, str]]:
    """Rows by column (lower case), without comments; the separator is the one that the header uses."""
    text = path.read_text("utf-8-sig", "replace")
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    separator = max(",;\t", key=header.count)
    rows = csv.DictReader(io.StringIO("\n".join(lines)), delimiter=separator, skipinitialspace=True)
    return [{str(k).strip().lower(): v or "" for k, v in row.items() if k is not None} for row in rows]


def read_table(rows: Sequence[Mapping[str, str]]) -> RunSeries:
    """A CSV of gauges and rates; rows of several engines at one time are added up.

    Raises:
        InputError: no row of numbers.
    """
    columns = list(rows[0]) if rows else []
    kv, setup = column(columns, KV), column(columns, ("setup", "run"))
    if setup:
        rows = [row for row in rows if row[setup] == rows[-1][setup]]
    numbers = {name: column(columns, names) for name, names in _TABLE.items()}
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
    return with_spans(
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


def read_completions(rows: Sequence[Mapping[str, str]], path: Path) -> Completions:
    """A CSV of ends: counts of each bin, or their running total.

    Raises:
        InputError: fewer than two rows of numbers.
    """
    columns = list(rows[0]) if rows else []
    time, ended, total = column(columns, BIN), column(columns, ENDED), column(columns, (TOTAL,))
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


def column(columns: Sequence[str], names: Sequence[str]) -> str | None:
    """The first of the names that is a column."""
    return next((name for name in names if name in columns), None)


def _float(text: str | None) -> float | None:
    """A finite number, or ``None``."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _sum(rows: Sequence[Mapping[str, float | None]], name: str) -> float | None:
    known = [value for row in rows if (value := row[name]) is not None]
    return sum(known) if known else None
