from __future__ import annotations

import dataclasses

import pytest

from autotune.measure.facts import Facts, facts_of
from autotune.measure.validity import client_limit, invalid_reasons
from autotune.measure.window import View
from autotune.records.observation import Observation
from tests.unit.measure.loads import CLIENT, Server, closed_loop, lognormal, with_samples


@pytest.fixture(scope="module")
def load() -> Observation:
    return closed_loop(Server(hit_share=0.3), lognormal(3000, 200, 0.6), n=32, until_s=60)


@pytest.fixture(scope="module")
def facts(load: Observation) -> Facts:
    return facts_of(load, 20, 40)


def reasons(load: Observation, facts: Facts | None, **changes: object) -> list[str]:
    found = invalid_reasons(load, facts, View(load).counter, **changes)
    return [reason.split(":")[0] for reason in found]


def test_a_good_load_has_none(load: Observation, facts: Facts) -> None:
    assert reasons(load, facts, expected_hit_share=0.3) == []
    assert reasons(load, None) == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        # 40 ends in 20 s: two places may be between two answers.
        ({"running_mean": 28.0, "waiting_mean": 0.5, "ended": 40}, "in_flight_short"),
        ({"running_mean": 29.0, "waiting_mean": 0.5, "ended": 40}, None),
        ({"running_mean": 30.0, "waiting_mean": 0.5, "ended": 0}, "in_flight_short"),
        ({"running_mean": 31.0, "waiting_mean": 0.5, "ended": 0}, None),
        # However short the answers, three quarters must be there.
        ({"running_mean": 22.0, "waiting_mean": 0.0, "ended": 9000}, "in_flight_short"),
        ({"running_mean": 32.0, "waiting_mean": 5.0}, "foreign_load"),
        ({"running_mean": 8.0, "waiting_mean": 24.0}, None),
        ({"running_mean": None}, None),
        ({"longest_gap_s": 6.0}, "metrics_missing"),
        ({"longest_gap_s": 5.0}, None),
        ({"samples": 7}, "few_samples"),
        ({"lock_step": 0.9}, "lock_step"),
        ({"lock_step": 0.9, "mean_life_s": 1.9}, None),
        ({"lock_step": 0.9, "mean_life_s": None}, None),
        ({"lock_step": 0.7}, None),
        ({"prefix_hit_share": 0.45}, "prefix_reuse"),
        ({"prefix_hit_share": 0.45, "preemptions": 3}, None),
        ({"prefix_hit_share": None}, None),
    ],
)
def test_what_breaks_a_reading(load: Observation, facts: Facts, change: dict[str, object], reason: str | None) -> None:
    changed = dataclasses.replace(facts, **{"mean_life_s": 4.0, **change})
    assert reasons(load, changed, expected_hit_share=0.3) == ([] if reason is None else [reason])


def test_one_in_flight_may_be_half_missing(load: Observation, facts: Facts) -> None:
    alone = dataclasses.replace(load, concurrency=1)
    thin = dataclasses.replace(facts, running_mean=0.7, waiting_mean=0.0, ended=0)
    assert reasons(alone, thin) == []
    assert reasons(alone, dataclasses.replace(thin, running_mean=0.4)) == ["in_flight_short"]


def test_hits_are_not_judged_where_nothing_is_expected(load: Observation, facts: Facts) -> None:
    assert reasons(load, dataclasses.replace(facts, prefix_hit_share=1.0)) == []


def test_the_clients_own_counts_need_no_readings(load: Observation) -> None:
    blind = with_samples(load, [])
    assert reasons(blind, facts_of(blind, 20, 40)) == []


def test_a_client_at_its_limit() -> None:
    busy = dataclasses.replace(CLIENT, cpu_s=27.0)
    assert "0.90 of a core" in (client_limit(busy, 30.0, 5.0) or "")
    assert client_limit(dataclasses.replace(CLIENT, cpu_s=20.0), 30.0, 5.0) is None
    assert client_limit(CLIENT, 0.0, None) is None


@pytest.mark.parametrize(
    ("lag", "life", "late"),
    [
        (0.04, 0.1, False),
        (0.06, 0.1, True),
        (0.06, 5.0, False),
        (0.2, 1.0, True),
        (0.45, 300.0, False),
        (0.55, 300.0, True),
        (0.06, None, True),
    ],
)
def test_lag_counts_against_the_life_of_an_answer(lag: float, life: float | None, late: bool) -> None:
    limit = client_limit(dataclasses.replace(CLIENT, loop_lag_p99_s=lag), 30.0, life)
    assert (limit is not None) == late


def test_a_late_client_is_a_reason(load: Observation, facts: Facts) -> None:
    late = dataclasses.replace(load, client=dataclasses.replace(CLIENT, loop_lag_p99_s=2.0))
    assert reasons(late, facts) == ["client_late"]


def test_forced_lengths_must_be_there(load: Observation, facts: Facts) -> None:
    asked = {r.id: r.output_tokens or 9 for r in load.requests}
    assert reasons(load, facts, planned=asked) == []
    assert reasons(load, None, planned={**asked, "r1": 1}) == ["lengths_off"]
