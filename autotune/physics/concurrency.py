"""The best number in flight by the model, without trying each."""

from __future__ import annotations

from autotune.physics.fluid import FluidRun, fluid_run, loop_shape
from autotune.physics.forecast import best_of
from autotune.physics.laws import LengthLaw
from autotune.physics.simulator import EngineLimits
from autotune.physics.steptime import StepModel

OVER = 10.0
"""A KV demand over the limit makes a concurrency so much worse than any that keeps it."""


def best_concurrency(
    model: StepModel,
    limits: EngineLimits,
    law: LengthLaw,
    *,
    prompt_tokens: float,
    requests: int,
    engines: int = 1,
    largest: int | None = None,
    kv_limit: float | None = None,
) -> tuple[int, FluidRun]:
    """Number in flight with the shortest makespan, and the run it gives.

    Args:
        law: of the answers, cut at the run's limit.
        prompt_tokens: mean.
        largest: not more than this (default: ``max_num_seqs`` of all engines, and the requests).
        kv_limit: the largest KV demand over the capacity (1: on the brink of preemption); ``None``: any.
    """
    shape = loop_shape(law)
    highest = max(1, min(requests, limits.max_num_seqs * engines, largest or requests))

    def run(concurrency: int) -> FluidRun:
        return fluid_run(
            model,
            limits,
            shape,
            prompt_tokens=prompt_tokens,
            requests=requests,
            concurrency=concurrency,
            engines=engines,
        )

    def measure(concurrency: int) -> float:
        found = run(concurrency)
        over = 0.0 if kv_limit is None else max(0.0, found.kv_peak - kv_limit)
        return found.makespan_s * (1 + OVER * over)

    best = best_of(measure, min(engines, highest), highest)
    return best, run(best)
