"""Which load comes next inside one server start: concurrency costs no restart, so it is climbed here."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.records.measurement import Measurement
from autotune.records.trial import ConcurrencyPlan

CALIBRATION, NEAR = (8, 64), 1.5
"""In flight, beside the planned number: how fast small batches are cannot be read from full ones. Within a factor
of 1.5 of a planned value they would tell nothing more."""


TIE = 0.01
"""Rates this close are the same: two windows of one server differ by as much."""


def next_concurrency(plan: ConcurrencyPlan, loads: Sequence[Measurement], ceiling: int) -> int | None:
    """The next concurrency to try, or ``None`` when this start has shown what it can.

    Doubles from ``plan.start`` until throughput stops rising, requests wait for a slot, preemption starts or
    the KV cache is full; then looks ``plan.refine`` times between the best step and its neighbours.

    Args:
        plan: fixed values, or the climb's limits.
        loads: what was measured in this start so far, in order.
        ceiling: most requests that can be in flight at all (questions of the run).
    """
    if loads and loads[-1].outcome == "failed":
        return None
    if plan.values:
        rest = planned_values(plan)[len(loads) :]
        return min(rest[0], ceiling) if rest else None
    top = min(plan.limit, ceiling)
    if not loads:
        return min(plan.start, top)
    tried = {load.concurrency for load in loads}
    steps = _climbed(loads)
    last = loads[-1]
    if steps == len(loads) and last.concurrency < top and not _ends_climb(plan, loads):
        return min(2 * last.concurrency, top)
    if len(loads) - steps >= plan.refine:
        return None
    return _between(loads, tried)


def planned_values(plan: ConcurrencyPlan) -> tuple[int, ...]:
    """The plan's own values, with small batches before them where it asks for calibration."""
    if not plan.calibrate or not plan.values:
        return plan.values
    highest = max(plan.values)
    small = [n for n in CALIBRATION if n * NEAR < highest and all(not 1 / NEAR < n / v < NEAR for v in plan.values)]
    return (*small, *plan.values)


def best_load(loads: Sequence[Measurement]) -> int | None:
    """Index of the fastest load that is steady, valid and stable; of a tie, the one with fewest in flight."""
    usable = [
        (load.output_tokens_per_s, load.concurrency, i)
        for i, load in enumerate(loads)
        if load.outcome == "steady" and load.valid and load.stable and load.output_tokens_per_s is not None
    ]
    if not usable:
        return None
    tied = [one for one in usable if one[0] >= (1.0 - TIE) * max(usable)[0]]
    return min(tied, key=lambda one: one[1])[2]


def _climbed(loads: Sequence[Measurement]) -> int:
    """Length of the rising part; a refinement always lies below the last step of the climb."""
    for i in range(1, len(loads)):
        if loads[i].concurrency <= loads[i - 1].concurrency:
            return i
    return len(loads)


def _ends_climb(plan: ConcurrencyPlan, loads: Sequence[Measurement]) -> bool:
    last = loads[-1]
    if last.outcome in ("saturated", "failed") or (last.waiting_mean or 0.0) >= 0.5:
        return True
    rates = [load.output_tokens_per_s for load in loads[:-1] if load.output_tokens_per_s is not None]
    if last.output_tokens_per_s is None or not rates:
        return False
    return last.output_tokens_per_s < (1.0 + plan.gain) * max(rates)


def _between(loads: Sequence[Measurement], tried: set[int]) -> int | None:
    best = best_load(loads)
    if best is None:
        lowest = min(tried)
        return lowest // 2 if lowest > 1 and lowest // 2 not in tried else None
    at = loads[best].concurrency
    above = min((c for c in tried if c > at), default=None)
    below = max((c for c in tried if c < at), default=None)
    for neighbour in (above, below):
        if neighbour is not None:
            middle = round(math.sqrt(at * neighbour))
            if middle not in tried and middle not in (at, neighbour):
                return middle
    return None
