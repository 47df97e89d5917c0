"""Which load comes next inside one server start: concurrency costs no restart, so it is climbed here."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.records.measurement import Measurement
from autotune.records.trial import ConcurrencyPlan


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
        rest = plan.values[len(loads) :]
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


def best_load(loads: Sequence[Measurement]) -> int | None:
    """Index of the fastest load that is steady, valid and stable."""
    usable = [
        (load.output_tokens_per_s, -load.concurrency, i)
        for i, load in enumerate(loads)
        if load.outcome == "steady" and load.valid and load.stable and load.output_tokens_per_s is not None
    ]
    return max(usable)[2] if usable else None


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
