"""Random runs under way, as a vLLM log would show them: clients, lengths, models and cards of many kinds."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from autotune.evaluation.follow_series import Reading, RunSeries
from autotune.physics.closed_loop import run_closed_loop
from autotune.physics.simulator import EngineLimits, Noise
from tests.proof.worlds import World, random_world

DRIFT_SD, DRIFT_S = 0.04, 120.0
"""Slow error of the step model on a real server: 4-5 % over minutes."""


@dataclass(frozen=True)
class Run:
    world: World
    kind: str
    series: RunSeries
    truth_s: float
    kv_full_s: float | None
    requests: int


def drifting(rng: random.Random) -> Noise:
    """A factor on the steps' duration that wanders slowly, beside a little white noise."""
    state = [rng.gauss(0.0, DRIFT_SD)]

    def factor() -> float:
        keep = math.exp(-1.0 / DRIFT_S)
        state[0] = keep * state[0] + math.sqrt(1 - keep * keep) * rng.gauss(0.0, DRIFT_SD)
        return math.exp(state[0] + rng.gauss(0.0, 0.03))

    return factor


def random_run(seed: int, *, columns: str = "all") -> Run:
    """One run and its lines.

    Args:
        columns: ``all``; ``gauges``: no prompt rate and no capacity, as a CSV of five columns has it.
    """
    world = random_world(seed, spread=0.6)
    rng = random.Random(seed + 5)
    kind = rng.choice(["at once", "at once", "closed loop", "closed loop", "queue"])
    requests = rng.choice([100, 300, 1000, 2158])
    per_engine = world.concurrency / world.engines
    engines = rng.choice([1, 1, 1, 2])
    concurrency = requests if kind != "closed loop" else min(max(8, round(per_engine * engines)), max(8, requests // 3))
    seqs = 1024 if kind != "queue" else max(8, round(requests / engines / rng.choice([2, 4, 8])))
    limits = EngineLimits(
        kv_tokens=world.limits.kv_tokens,
        max_num_seqs=max(seqs, 8),
        max_num_batched_tokens=max(8192, seqs),
        hit_share=world.limits.hit_share,
    )
    truth = world.truth
    run = run_closed_loop(
        truth,
        limits,
        world.requests_of(seed + 10_000, requests),
        concurrency,
        engines=engines,
        sample_s=10.0,
        noise=drifting(rng),
    )
    readings, before = [], None
    full = None
    for sample in [*run.samples, run.end]:
        t_s = 10.0 * (len(readings) + 1) if sample is run.end else sample.t_s
        written = sample.generated_tokens - (before.generated_tokens if before else 0)
        prompts = sample.prompt_tokens - (before.prompt_tokens if before else 0)
        usage = round(sample.kv_usage, 3)
        full = t_s if full is None and usage >= 0.99 else full
        readings.append(
            Reading(
                t_s=t_s,
                span_s=10.0,
                output_tokens=round(written / 10, 1) * 10,
                running=sample.running,
                waiting=sample.waiting,
                kv_usage=usage,
                kv_highest=usage,
                prompt_tokens=float(prompts) if columns == "all" else None,
            )
        )
        before = sample
    series = RunSeries(
        readings=tuple(readings),
        source="log",
        engines=engines,
        kv_capacity_tokens=limits.kv_tokens * engines if columns == "all" else None,
    )
    return Run(world, kind, series, run.makespan_s, full, requests)
