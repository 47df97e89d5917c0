from __future__ import annotations

import pytest

from autotune.records.measurement import Measurement
from autotune.records.trial import ConcurrencyPlan
from autotune.search.climb import best_load, next_concurrency, planned_values
from tests.unit.search.results import load


def climb(plan: ConcurrencyPlan, server: dict[int, Measurement], ceiling: int = 10_000) -> list[int]:
    loads: list[Measurement] = []
    while (concurrency := next_concurrency(plan, loads, ceiling)) is not None:
        loads.append(server[concurrency])
        assert len(loads) < 30
    return [one.concurrency for one in loads]


def test_it_doubles_while_throughput_rises_then_looks_between() -> None:
    server = {8: load(8, 100), 16: load(16, 190), 32: load(32, 300), 64: load(64, 302), 45: load(45, 310)}
    assert climb(ConcurrencyPlan(), server) == [8, 16, 32, 64, 45]
    assert best_load([server[c] for c in (8, 16, 32, 64, 45)]) == 4


def test_it_refines_as_often_as_told() -> None:
    server = {8: load(8, 100), 16: load(16, 90), 11: load(11, 105), 13: load(13, 104), 12: load(12, 101)}
    assert climb(ConcurrencyPlan(refine=0), server) == [8, 16]
    assert climb(ConcurrencyPlan(refine=3), server) == [8, 16, 11, 13, 12]


@pytest.mark.parametrize(
    "last",
    [
        load(32, None, outcome="saturated", preemptions=4),
        load(32, 400, waiting_mean=9.0),
        load(32, None, outcome="failed", stable=False),
    ],
)
def test_saturation_queueing_and_failure_end_the_climb(last: Measurement) -> None:
    server = {8: load(8, 100), 16: load(16, 190), 32: last, 23: load(23, 240)}
    steps = climb(ConcurrencyPlan(), server)
    assert steps[:3] == [8, 16, 32]
    assert 64 not in steps
    if last.outcome == "failed":
        assert steps == [8, 16, 32]


def test_the_number_of_questions_and_the_limit_bound_the_climb() -> None:
    server = {c: load(c, 100.0 * c) for c in (8, 16, 20, 12)}
    assert climb(ConcurrencyPlan(refine=0), server, ceiling=20) == [8, 16, 20]
    assert climb(ConcurrencyPlan(refine=0, limit=12), server) == [8, 12]
    assert next_concurrency(ConcurrencyPlan(start=64), [], 5) == 5


def test_fixed_values_are_measured_in_order_until_one_fails() -> None:
    server = {100: load(100, 10), 32: load(32, 20), 64: load(64, None, outcome="failed")}
    assert climb(ConcurrencyPlan(values=(100, 32)), server) == [100, 32]
    assert climb(ConcurrencyPlan(values=(64, 32)), server) == [64]


def test_when_the_first_load_saturates_a_smaller_one_is_tried() -> None:
    server = {8: load(8, None, outcome="saturated"), 4: load(4, 60)}
    assert climb(ConcurrencyPlan(), server) == [8, 4]
    one = load(1, None, outcome="saturated")
    assert next_concurrency(ConcurrencyPlan(start=1), [one], 10) is None


def test_only_steady_valid_stable_loads_can_be_best() -> None:
    loads = [
        load(8, 100),
        load(16, 500, stable=False),
        load(32, 600, valid=False, outcome="invalid"),
        load(64, 700, outcome="saturated"),
        load(128, None, outcome="not_settled"),
    ]
    assert best_load(loads) == 0
    assert best_load(loads[1:]) is None
    assert best_load([load(16, 100), load(8, 100)]) == 1


@pytest.mark.parametrize(
    ("values", "loads"),
    [
        ((160,), (8, 64, 160)),
        ((80,), (8, 80)),
        ((32, 100), (8, 64, 32, 100)),
        ((8, 64, 200), (8, 64, 200)),
        ((10,), (10,)),
        ((4,), (4,)),
        ((), ()),
    ],
)
def test_calibration_adds_small_batches_that_are_not_there(values: tuple[int, ...], loads: tuple[int, ...]) -> None:
    assert planned_values(ConcurrencyPlan(values=values, calibrate=True)) == loads
    assert planned_values(ConcurrencyPlan(values=values)) == values


def test_calibration_loads_come_first() -> None:
    plan = ConcurrencyPlan(values=(160,), calibrate=True)
    assert climb(plan, {n: load(n, 10.0 * n) for n in (8, 64, 160)}) == [8, 64, 160]
