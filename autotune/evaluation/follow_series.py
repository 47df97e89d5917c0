"""A run under way as a series of readings: which stretch of a log is the run, and when it began and ended."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

USUAL_SPAN_S = 10.0
"""vLLM's interval between stats lines."""
IDLE_GAP = 3.5
"""A pause of so many usual intervals without a line is idleness (vLLM prints nothing while idle)."""
SAME_RUN_S = 60.0
"""Stretches of like size that are less apart belong to one run (batches sent one after the other)."""
LIKE = 0.5
"""Like size: at least this share of the largest number in flight, or of the tokens."""
WARM_UP = 0.05
"""Leading readings with fewer in flight than this share of the peak are warm-up requests."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one line or page says of the time since the one before."""

    t_s: float
    """End of the interval, seconds on the source's clock."""
    span_s: float
    """Length of the interval."""
    output_tokens: float
    """Written in the interval, all engines."""
    running: float
    """At its end, all engines, as is ``waiting``."""
    waiting: float
    kv_usage: float | None = None
    """Share of the KV cache in use, mean over engines, 0..1."""
    kv_highest: float | None = None
    """Of the fullest engine."""
    prompt_tokens: float | None = None
    """Computed in the interval."""
    completions: float | None = None
    """Answers that ended in the interval."""

    @property
    def in_flight(self) -> float:
        """Running and waiting."""
        return self.running + self.waiting


@dataclass(frozen=True, kw_only=True)
class RunSeries:
    """All readings of a source, oldest first."""

    readings: tuple[Reading, ...]
    source: str
    """What it was: ``log``, ``metrics``, ``csv``, ``completions``."""
    engines: int = 1
    kv_capacity_tokens: int | None = None
    """Summed over engines."""
    life_starts: tuple[float, ...] = ()
    """Moments at which another server began (a restart in the same log)."""


@dataclass(frozen=True, kw_only=True)
class RunStretch:
    """The readings of the run itself; ``t_s`` counts from the first send."""

    readings: tuple[Reading, ...]
    elapsed_s: float
    """From the first send to the last reading, or to the end when it is over."""
    ended: bool
    """Nothing is in flight any more."""
    restarted: bool
    """The server began anew after it: the run was broken off."""
    notes: tuple[str, ...] = ()


def with_spans(series: RunSeries) -> RunSeries:
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


def run_stretch(series: RunSeries, at_s: float | None = None) -> RunStretch | None:
    """The stretch that is the run: the last large one, without warm-up; ``None``: the source shows no load.

    Args:
        at_s: look at so many seconds from the first send only, as if it were now.
    """
    stretches = _stretches(series)
    if not stretches:
        return None
    peak = max(_peak(s) for s in stretches)
    tokens = max(_tokens(s) for s in stretches)
    large = [i for i, s in enumerate(stretches) if _peak(s) >= LIKE * peak or _tokens(s) >= LIKE * tokens]
    last = first = large[-1]
    while first - 1 in large and _one_run(stretches[first - 1], stretches[first], series):
        first -= 1
    chosen = _without_warm_up([r for s in stretches[first : last + 1] for r in s])
    start = chosen[0].t_s - chosen[0].span_s
    chosen = [dataclasses.replace(r, t_s=r.t_s - start) for r in chosen]
    notes = []
    if first > 0:
        notes.append("earlier load in the same source is left out")
    after = [r for r in series.readings if r.t_s - start > chosen[-1].t_s]
    restarted = any(t - start > chosen[-1].t_s for t in series.life_starts)
    ended, elapsed = chosen[-1].in_flight == 0, chosen[-1].t_s
    if not ended and after and not restarted:
        # The line that would have said zero is missing, or is a zero line: it ended in between.
        ended, elapsed = True, min(after[0].t_s - start - after[0].span_s / 2, elapsed + _usual_span(chosen))
    if at_s is not None and at_s < elapsed:
        seen = [r for r in chosen if r.t_s <= at_s + 1e-6]
        if not seen:
            return None
        chosen, ended, elapsed, restarted = seen, False, seen[-1].t_s, False
    return RunStretch(
        readings=tuple(chosen), elapsed_s=elapsed, ended=ended, restarted=restarted and not ended, notes=tuple(notes)
    )


def _stretches(series: RunSeries) -> list[list[Reading]]:
    """Busy readings, split where nothing was in flight, where lines are missing, and at restarts."""
    usual = _usual_span(series.readings)
    found: list[list[Reading]] = []
    open_ = False
    for before, reading in itertools.pairwise([None, *series.readings]):
        if reading is None:
            continue
        if before is not None and (
            reading.t_s - before.t_s > IDLE_GAP * usual
            or any(before.t_s < t <= reading.t_s for t in series.life_starts)
        ):
            open_ = False
        if reading.in_flight == 0 and reading.output_tokens <= 0:
            open_ = False
            continue
        if not open_:
            found.append([])
            open_ = True
        found[-1].append(reading)
        open_ = reading.in_flight > 0
    return [s for s in found if _peak(s) > 0]


def _one_run(earlier: Sequence[Reading], later: Sequence[Reading], series: RunSeries) -> bool:
    gap = later[0].t_s - later[0].span_s - earlier[-1].t_s
    same_life = not any(earlier[-1].t_s < t <= later[0].t_s for t in series.life_starts)
    return same_life and gap < SAME_RUN_S and _peak(earlier) >= LIKE * _peak(later)


def _without_warm_up(readings: list[Reading]) -> list[Reading]:
    peak = _peak(readings)
    first = next(i for i, r in enumerate(readings) if r.in_flight >= WARM_UP * peak)
    return readings[first:]


def _usual_span(readings: Sequence[Reading]) -> float:
    gaps = [b.t_s - a.t_s for a, b in itertools.pairwise(readings) if b.t_s > a.t_s]
    return statistics.median(gaps) if gaps else 10.0


def _peak(readings: Sequence[Reading]) -> float:
    return max((r.in_flight for r in readings), default=0.0)


def _tokens(readings: Sequence[Reading]) -> float:
    return sum(r.output_tokens for r in readings)
