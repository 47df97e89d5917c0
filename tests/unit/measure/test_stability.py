from __future__ import annotations

import dataclasses

import pytest

from autotune.measure.facts import Facts, facts_of
from autotune.measure.rate import Rate
from autotune.measure.stability import truncated_share, violations
from autotune.measure.window import Window
from autotune.records.measurement import Latency
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


def broken_rules(load: Observation, facts: Facts, window: Window | None, spec: MeasureSpec = SPEC) -> dict[str, float]:
    return violations(load, spec, facts, window, None, truncated=truncated_share(load), answer_tokens=200.0)


def window(change: float = 0.0) -> Window:
    rate = Rate(per_s=100.0, half_width=1.0, freedom=9, change=change, change_noise=0.01)
    return Window(start_s=10, end_s=30, rate=rate, source="server")


def test_a_good_load_violates_nothing(load: Observation, facts: Facts) -> None:
    found = broken_rules(load, facts, window())
    assert all(value <= 0 for value in found.values())
    assert len(found) == 9


def test_every_load_has_the_same_rules(load: Observation, facts: Facts) -> None:
    empty = dataclasses.replace(load, samples=(), requests=(), t_s=0.0)
    nothing = broken_rules(empty, facts_of(empty, 0, 0), None)
    assert set(nothing) == set(broken_rules(load, facts, window()))
    assert {rule for rule, value in nothing.items() if value > 0} == {"drift"}


def test_failed_requests(load: Observation, facts: Facts) -> None:
    broken = failing(load, ["r1", "r2"])
    ended = sum(r.ended_s is not None for r in load.requests)
    assert broken_rules(broken, facts, window())["failed_requests"] == pytest.approx(2 / ended)
    mild = dataclasses.replace(SPEC, failed_limit=0.5)
    assert broken_rules(broken, facts, window(), mild)["failed_requests"] < 0


def test_engine_and_stall(load: Observation, facts: Facts) -> None:
    dead = dataclasses.replace(load, end="engine_died")
    assert broken_rules(dead, facts, window())["engine"] == 1
    stalled = dataclasses.replace(load, end="stalled")
    assert broken_rules(stalled, facts, window())["stall"] == 1


def test_a_silence_counts_only_while_something_is_held(load: Observation, facts: Facts) -> None:
    def stall(samples: list[object]) -> float:
        return broken_rules(with_samples(load, samples), facts, window())["stall"]

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
    assert (broken_rules(load, some, window())["preemptions"] > 0) == above


def test_answers_that_do_not_end_inside_are_counted_by_their_tokens(load: Observation, facts: Facts) -> None:
    long = dataclasses.replace(facts, ended=0, preemptions=1, generated=200 * 100)
    assert broken_rules(load, long, window())["preemptions"] < 0
    unknown = dataclasses.replace(long, generated=None)
    assert broken_rules(load, unknown, window())["preemptions"] == pytest.approx(1 / 0.02 - 1)


def test_cache_drift_and_truncation(load: Observation, facts: Facts) -> None:
    full = dataclasses.replace(facts, kv_max=0.99)
    assert broken_rules(load, full, window())["kv"] == pytest.approx(0.99 / 0.95 - 1)
    assert broken_rules(load, facts, window(-0.2))["drift"] == pytest.approx(1.0)
    cut = dataclasses.replace(
        load, requests=tuple(dataclasses.replace(r, finish_reason="length") for r in load.requests)
    )
    assert truncated_share(cut) == 1
    strict = dataclasses.replace(SPEC, truncation_limit=0.1)
    assert broken_rules(cut, facts, window(), strict)["truncation"] == pytest.approx(9)
    assert broken_rules(cut, facts, window())["truncation"] == 0
    unknown = violations(cut, strict, facts, window(), None, truncated=None, answer_tokens=None)
    assert unknown["truncation"] == 0


def test_latencies_count_where_they_are_limited(load: Observation, facts: Facts) -> None:
    seen = Latency(ttft_p50_s=0.5, ttft_p99_s=2.0, tpot_p50_s=0.02, tpot_p99_s=0.03)

    def broken(spec: MeasureSpec, latency: Latency | None = seen) -> dict[str, float]:
        return violations(load, spec, facts, window(), latency, truncated=None, answer_tokens=None)

    assert (broken(SPEC)["ttft"], broken(SPEC)["tpot"]) == (0, 0)
    limited = dataclasses.replace(SPEC, max_ttft_s=1.0, max_tpot_s=0.04)
    assert broken(limited)["ttft"] == pytest.approx(1.0)
    assert broken(limited)["tpot"] == pytest.approx(-0.25)
    assert broken(limited, None)["ttft"] == 0
