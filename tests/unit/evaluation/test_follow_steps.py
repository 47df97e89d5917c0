"""Speed and capacity of the server, as its run shows them."""

from __future__ import annotations

import dataclasses
import statistics

import numpy as np
import pytest

from autotune.evaluation.follow_draws import LawDraws, draw_laws
from autotune.evaluation.follow_replay import Flight, read_flight, replay
from autotune.evaluation.follow_series import Reading, RunSeries
from autotune.evaluation.follow_steps import kv_capacity, run_limits, step_draws
from autotune.physics.laws import lognormal_law
from autotune.physics.lengths import KnownLength
from autotune.physics.steptime import StepModel
from tests.unit.evaluation import follow_runs as runs

ANSWERS = KnownLength(uncut=lognormal_law(mean=1900, sigma=0.7, max_tokens=None), max_tokens=4000)
ONCE = runs.played(160, capacity=2.5e5)


def setup(readings: tuple[Reading, ...], capacity: int | None = None) -> tuple[RunSeries, Flight, LawDraws]:
    series = RunSeries(readings=readings, source="log", kv_capacity_tokens=capacity)
    flight = read_flight(readings, 160)
    draws = draw_laws(flight, capacity, 4000, ANSWERS, 8, np.random.default_rng(1))
    return series, flight, draws


def drawn(readings: tuple[Reading, ...], capacity: float | None) -> list[tuple[StepModel, float]]:
    series, flight, draws = setup(readings)
    written = replay(flight, draws.chance(0), 4000, np.random.default_rng(1))[2]
    return step_draws(series, flight, written, capacity, runs.PROMPT, 16, np.random.default_rng(1))


def test_the_capacity_as_logged() -> None:
    series, flight, draws = setup(runs.readings(ONCE.rows[:8]), 123_456)
    assert kv_capacity(series, flight, draws, 4000) == 123_456


@pytest.mark.parametrize("prompts", [True, False])
@pytest.mark.parametrize("count", [2, 8])
def test_the_capacity_from_its_use(prompts: bool, count: int) -> None:
    series, flight, draws = setup(runs.readings(ONCE.rows[:count], prompts=prompts))
    assert kv_capacity(series, flight, draws, 4000) == pytest.approx(2.5e5, rel=0.1 if prompts else 0.25)


def test_without_use_no_capacity_is_known() -> None:
    series, flight, draws = setup(runs.readings(ONCE.rows[:8], kv=False))
    assert kv_capacity(series, flight, draws, 4000) is None


@pytest.mark.parametrize("capacity", [2.5e5, None])
def test_steps_are_as_slow_as_the_lines_say(capacity: float | None) -> None:
    rows = ONCE.rows[:16]
    models = drawn(runs.readings(rows), capacity)
    assert len(models) == 16
    before, row = rows[3:5]
    batch, held = (before.running + row.running) / 2, (before.kv + row.kv) / 2 * 2.5e5
    middle = statistics.median(model.step_s(batch, held) for model, _ in models)
    assert batch / middle == pytest.approx(row.gen_tps, rel=0.1)
    assert all((again == 1.0) == (capacity is None) for _, again in models)


def test_a_full_cache_slows() -> None:
    rows = [dataclasses.replace(row, kv=0.999, gen_tps=row.gen_tps * 0.5) for row in ONCE.rows[6:12]]
    slow = drawn(runs.readings([*ONCE.rows[:6], *rows]), 2.5e5)
    usual = drawn(runs.readings(ONCE.rows[:12]), 2.5e5)
    assert statistics.median(a for _, a in slow) > statistics.median(a for _, a in usual)


def test_without_lines_the_prior_is_drawn() -> None:
    models = drawn(runs.readings(ONCE.rows[:1]), None)
    assert statistics.stdev(np.log([m.t0_s for m, _ in models])) > 0.2


def test_idle_lines_teach_nothing() -> None:
    readings = runs.readings(ONCE.rows[:3])
    idle = tuple(dataclasses.replace(r, output_tokens=0.0) for r in readings[1:])
    models = drawn((readings[0], *idle), 2.5e5)
    assert statistics.stdev(np.log([m.t0_s for m, _ in models])) > 0.2


def test_limits() -> None:
    series, flight, _ = setup(runs.readings(ONCE.rows[:8]))
    free = run_limits(series, flight, None, 4000, 200.0)
    assert (free.kv_tokens, free.max_num_seqs) == (10**12, 1024)
    queue = runs.readings(runs.played(160, seqs=32).rows[:8])
    limits = run_limits(RunSeries(readings=queue, source="log", engines=2), read_flight(queue, 160), 5e4, 4000, 200.0)
    assert (limits.kv_tokens, limits.max_num_seqs) == (25_000, 16)
    least = run_limits(series, flight, 10.0, 4000, 200.0)
    assert least.kv_tokens > 2 * 4000
