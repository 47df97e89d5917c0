from __future__ import annotations

import dataclasses

import pytest

from autotune.measure.bottleneck import bottleneck_in_sight, bottleneck_of
from autotune.measure.facts import Facts, facts_of
from autotune.measure.judge import judge
from autotune.records.measurement import Bottleneck, Measurement
from autotune.records.observation import Observation
from autotune.records.trial import MeasureSpec
from tests.unit.measure.loads import CAPACITY, CLIENT, Server, closed_loop, lognormal, with_samples


@pytest.fixture(scope="module")
def load() -> Observation:
    return closed_loop(Server(kv_tokens=100_000), lognormal(3000, 200, 0.6), n=32, until_s=60)


@pytest.fixture(scope="module")
def facts(load: Observation) -> Facts:
    return facts_of(load, 20, 40)


@pytest.fixture(scope="module")
def measured(load: Observation) -> Measurement:
    return judge(load, MeasureSpec(), CAPACITY)


def name(
    load: Observation,
    facts: Facts,
    *,
    seqs: int | None = 256,
    engines: int = 1,
    rate: float | None = None,
    earlier: tuple[Measurement, ...] = (),
) -> Bottleneck | None:
    capacity = dataclasses.replace(CAPACITY, max_num_seqs=seqs, engines=engines)
    return bottleneck_of(load, facts, capacity, kv_limit=0.95, rate=rate, earlier=earlier)


def test_nothing_is_guessed(load: Observation, facts: Facts) -> None:
    assert name(load, facts, rate=2000.0) is None


@pytest.mark.parametrize(
    ("change", "seqs", "engines", "kind", "evidence"),
    [
        ({"kv_max": 0.97}, 256, 1, "kv", "KV use 97%"),
        ({"preemptions": 4}, 256, 1, "kv", "4 preemptions in 20 s"),
        ({"preemptions": 4, "kv_max": None, "waiting_mean": 3.0}, 256, 1, "kv", "3.0 waiting"),
        ({"running_mean": 16.0, "waiting_mean": 16.0}, 16, 1, "sequences", "limit of 16"),
        ({"running_mean": 15.7, "waiting_mean": 16.3}, 8, 2, "sequences", "limit of 16"),
        ({"running_mean": 12.0, "waiting_mean": 20.0}, 16, 1, "prefill", "20.0 waiting"),
        ({"running_mean": 12.0, "waiting_mean": 20.0}, None, 1, "prefill", "waiting"),
        ({"running_mean": 28.0, "waiting_mean": 0.0}, 256, 1, "server_cpu", "holds 28.0"),
        (
            {"prompt_tokens_per_s": 9000.0, "peak_prompt_tokens_per_s": 12_000.0},
            256,
            1,
            "prefill",
            "9000 prompt tokens/s",
        ),
    ],
)
def test_what_limits_is_named_with_its_evidence(
    load: Observation,
    facts: Facts,
    change: dict[str, float],
    seqs: int | None,
    engines: int,
    kind: str,
    evidence: str,
) -> None:
    found = name(load, dataclasses.replace(facts, **change), seqs=seqs, engines=engines)
    assert found is not None
    assert found.kind == kind
    assert evidence in found.evidence
    assert found.knob


def test_a_late_client_comes_before_everything(load: Observation, facts: Facts) -> None:
    late = dataclasses.replace(load, client=dataclasses.replace(CLIENT, cpu_s=59.0))
    found = name(late, dataclasses.replace(facts, kv_max=1.0))
    assert found is not None
    assert found.kind == "client"
    sight = bottleneck_in_sight(late, facts, kv_limit=0.95)
    assert sight == found


def test_a_lane_that_waits_after_a_failure_is_not_the_servers_cpu(load: Observation, facts: Facts) -> None:
    held = dataclasses.replace(facts, running_mean=28.0, waiting_mean=0.0)
    gap = dataclasses.replace(load, client=dataclasses.replace(CLIENT, in_flight_min=27))
    assert name(gap, held) is None


def test_a_few_between_answers_are_not_the_limit(load: Observation, facts: Facts) -> None:
    assert name(load, dataclasses.replace(facts, running_mean=29.5, waiting_mean=0.0)) is None


def test_unknown_counters_name_nothing(load: Observation) -> None:
    blind = with_samples(load, [])
    assert name(blind, facts_of(blind, 20, 40)) is None
    assert bottleneck_in_sight(blind, facts_of(blind, 0, 60), kv_limit=0.95) is None


def earlier(measured: Measurement, concurrency: int, rate: float, **changes: object) -> Measurement:
    return dataclasses.replace(measured, concurrency=concurrency, outcome="steady", output_tokens_per_s=rate, **changes)


def test_bandwidth_while_it_rises_compute_when_it_does_not(
    load: Observation, facts: Facts, measured: Measurement
) -> None:
    before = (earlier(measured, 8, 300.0), earlier(measured, 16, 600.0), earlier(measured, 64, 1.0))
    rising, flat = name(load, facts, rate=1000.0, earlier=before), name(load, facts, rate=630.0, earlier=before)
    assert rising is not None
    assert (rising.kind, rising.evidence) == ("bandwidth", "1.67 times the throughput of 16 in flight")
    assert flat is not None
    assert (flat.kind, flat.evidence) == ("compute", "1.05 times the throughput of 16 in flight")


def test_only_steady_loads_well_below_are_compared(load: Observation, facts: Facts, measured: Measurement) -> None:
    near = earlier(measured, 30, 900.0)
    saturated = dataclasses.replace(earlier(measured, 16, 600.0), outcome="saturated")
    invalid = earlier(measured, 16, 600.0, valid=False)
    assert name(load, facts, rate=1000.0, earlier=(near, saturated, invalid)) is None
    assert name(load, facts, rate=None, earlier=(earlier(measured, 8, 300.0),)) is None


def rising(load: Observation, per_s: float, first: float) -> Observation:
    samples = [dataclasses.replace(s, kv_usage=min(1.0, first + per_s * s.t_s)) for s in load.samples]
    return with_samples(load, samples)


def test_a_cache_that_will_be_full_is_in_sight(load: Observation) -> None:
    soon = rising(load, 0.009, 0.1)
    found = bottleneck_in_sight(soon, facts_of(soon, 0, 60), kv_limit=0.95)
    assert found is not None
    assert found.kind == "kv"
    assert "still rising" in found.evidence
    slow = rising(load, 0.002, 0.1)
    assert bottleneck_in_sight(slow, facts_of(slow, 0, 60), kv_limit=0.95) is None
    few = with_samples(soon, soon.samples[:3])
    assert bottleneck_in_sight(few, facts_of(few, 0, 3), kv_limit=0.95) is None
