from __future__ import annotations

import dataclasses

import pytest

from autotune.measure.facts import Facts, facts_of
from autotune.measure.rate import Rate
from autotune.measure.stability import truncated_share, violations
from autotune.measure.window import Window
from autotune.records.observation import Observation
from autotune.records.trial import MeasureSpec
from tests.unit.measure.loads import Server, closed_loop, failing, lognormal, with_samples

SPEC = MeasureSpec()


@pytest.fixture(scope="module")
def load() -> Observation:
    return closed_loop(Server(), lognormal(3000, 200, 0.6), n=8, until_s=40)


@pytest.fixture(scope="module")
def facts(load: Observation) -> Facts:
    return facts_of(load, 10, 30)


def window(change: float = 0.0) -> Window:
    rate = Rate(per_s=100.0, half_width=1.0, change=change, change_noise=0.01)
    return Window(start_s=10, end_s=30, rate=rate, source="server")


def test_a_good_load_violates_nothing(load: Observation, facts: Facts) -> None:
    found = violations(load, SPEC, facts, window(), forced=False)
    assert all(value <= 0 for value in found.values())
    assert len(found) == 7


def test_every_load_has_the_same_rules(load: Observation, facts: Facts) -> None:
    empty = dataclasses.replace(load, samples=(), requests=(), t_s=0.0)
    nothing = violations(empty, SPEC, facts_of(empty, 0, 0), None, forced=True)
    assert set(nothing) == set(violations(load, SPEC, facts, window(), forced=False))
    assert {rule for rule, value in nothing.items() if value > 0} == {"drift"}


def test_failed_requests(load: Observation, facts: Facts) -> None:
    broken = failing(load, ["r1", "r2"])
    ended = sum(r.ended_s is not None for r in load.requests)
    assert violations(broken, SPEC, facts, window(), forced=False)["failed_requests"] == pytest.approx(2 / ended)
    mild = dataclasses.replace(SPEC, failed_limit=0.5)
    assert violations(broken, mild, facts, window(), forced=False)["failed_requests"] < 0


def test_engine_and_stall(load: Observation, facts: Facts) -> None:
    dead = dataclasses.replace(load, end="engine_died")
    assert violations(dead, SPEC, facts, window(), forced=False)["engine"] == 1
    stalled = dataclasses.replace(load, end="stalled")
    assert violations(stalled, SPEC, facts, window(), forced=False)["stall"] == 1


def test_a_silence_counts_only_while_something_is_held(load: Observation, facts: Facts) -> None:
    def stall(samples: list[object]) -> float:
        return violations(with_samples(load, samples), SPEC, facts, window(), forced=False)["stall"]

    frozen = [dataclasses.replace(s, generation_tokens=min(s.generation_tokens or 0, 5000)) for s in load.samples]
    began = next(s.t_s for s in frozen if s.generation_tokens == 5000)
    assert stall(list(frozen)) == pytest.approx((frozen[-1].t_s - began) / SPEC.stall_s - 1, abs=0.001)
    idle = [dataclasses.replace(s, running=0, waiting=0) for s in frozen]
    assert stall(list(idle)) == -1
    assert stall([dataclasses.replace(s, generation_tokens=None) for s in load.samples]) == 0


@pytest.mark.parametrize(("preemptions", "above"), [(0, False), (1, False), (20, True)])
def test_preemptions_count_per_answer(load: Observation, facts: Facts, preemptions: int, above: bool) -> None:
    assert facts.ended > 60
    some = dataclasses.replace(facts, preemptions=preemptions)
    assert (violations(load, SPEC, some, window(), forced=False)["preemptions"] > 0) == above


def test_answers_that_do_not_end_inside_are_counted_by_their_tokens(load: Observation, facts: Facts) -> None:
    long = dataclasses.replace(facts, ended=0, preemptions=1, generated=200 * 100)
    assert violations(load, SPEC, long, window(), forced=False)["preemptions"] < 0
    unknown = dataclasses.replace(long, generated=None)
    assert violations(load, SPEC, unknown, window(), forced=False)["preemptions"] == pytest.approx(1 / 0.02 - 1)


def test_cache_drift_and_truncation(load: Observation, facts: Facts) -> None:
    full = dataclasses.replace(facts, kv_max=0.99)
    assert violations(load, SPEC, full, window(), forced=False)["kv"] == pytest.approx(0.99 / 0.95 - 1)
    assert violations(load, SPEC, facts, window(-0.2), forced=False)["drift"] == pytest.approx(1.0)
    cut = dataclasses.replace(
        load, requests=tuple(dataclasses.replace(r, finish_reason="length") for r in load.requests)
    )
    assert truncated_share(cut) == 1
    strict = dataclasses.replace(SPEC, truncation_limit=0.1)
    assert violations(cut, strict, facts, window(), forced=False)["truncation"] == pytest.approx(9)
    assert violations(cut, strict, facts, window(), forced=True)["truncation"] == 0
    assert violations(cut, SPEC, facts, window(), forced=False)["truncation"] == 0
