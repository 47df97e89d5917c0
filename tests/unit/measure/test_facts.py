from __future__ import annotations

import dataclasses

import pytest

from autotune.measure.facts import facts_of, latency_of
from autotune.measure.stationary import stationary_load
from autotune.records.observation import Observation
from tests.unit.laws import fixed_law
from tests.unit.measure.loads import Server, closed_loop, failing, lognormal, with_samples
from tests.unit.measure.long_runs import prompts


@pytest.fixture(scope="module")
def load() -> Observation:
    server = Server(prompt=50, hit_share=0.4, kv_tokens=10_000)
    return closed_loop(server, lognormal(3000, 200, 0.6), n=8, until_s=60)


def test_means_and_differences_of_a_span(load: Observation) -> None:
    facts = facts_of(load, 20.0, 40.0)
    inside = [s for s in load.samples if 20 <= s.t_s <= 40]
    assert facts.samples == len(inside)
    assert facts.seconds == 20
    assert facts.generated == (inside[-1].generation_tokens or 0) - (inside[0].generation_tokens or 0)
    assert facts.running_mean == pytest.approx(8, abs=0.2)
    assert facts.held_mean == pytest.approx(8, abs=0.05)
    assert facts.kv_max == max(s.kv_usage or 0 for s in inside)
    assert 0 < (facts.kv_mean or 0) < (facts.kv_max or 0)
    assert facts.preemptions == 0
    assert facts.prefix_hit_share == pytest.approx(0.4, abs=0.01)
    assert facts.prompt_tokens_per_s == pytest.approx(facts.ended * 50 / 20, rel=0.2)
    assert (facts.peak_prompt_tokens_per_s or 0) >= (facts.prompt_tokens_per_s or 0)
    assert 0 < facts.longest_gap_s < 1.2
    assert facts.ended == sum(20 <= (r.ended_s or 0) <= 40 for r in load.requests)


def test_failed_requests_are_not_answers(load: Observation) -> None:
    inside = [r.id for r in load.requests if r.ended_s is not None and 20 <= r.ended_s <= 40]
    assert facts_of(failing(load, inside[:3]), 20, 40).ended == len(inside) - 3


def test_what_the_server_does_not_say_is_not_known(load: Observation) -> None:
    facts = facts_of(with_samples(load, []), 20, 40)
    assert (facts.kv_mean, facts.kv_max, facts.held_mean, facts.preemptions) == (None, None, None, None)
    assert (facts.prompt_tokens_per_s, facts.peak_prompt_tokens_per_s, facts.prefix_hit_share) == (None, None, None)
    assert facts.longest_gap_s == 20
    blind = with_samples(load, [dataclasses.replace(s, running=None, prefix_queries=0) for s in load.samples])
    assert facts_of(blind, 20, 40).held_mean is None
    assert facts_of(blind, 20, 40).prefix_hit_share is None


def test_a_gap_is_the_longest_time_without_a_reading(load: Observation) -> None:
    holes = with_samples(load, [s for s in load.samples if not 25 < s.t_s < 32])
    assert facts_of(holes, 20, 40).longest_gap_s == pytest.approx(7.5, abs=1)


def test_a_counter_that_goes_backwards_gives_nothing(load: Observation) -> None:
    samples = [dataclasses.replace(s, preemptions=100 - int(s.t_s)) for s in load.samples]
    assert facts_of(with_samples(load, samples), 20, 40).preemptions is None


def test_lock_step_of_equal_and_of_mixed_lengths() -> None:
    def phase(lengths: list[int], n: int = 16) -> float | None:
        return facts_of(closed_loop(Server(), lengths, n=n, until_s=60), 20, 50).lock_step

    assert (phase([400] * 3000) or 0) > 0.95
    assert (phase(lognormal(3000, 400, 0.8)) or 1) < 0.5
    # Equal lengths with a staggered first wave are spread evenly.
    assert (phase([25 * (i + 1) for i in range(16)] + [400] * 3000) or 1) < 0.3
    assert phase([400] * 300, n=3) is None


def test_lock_step_is_not_known_without_ends(load: Observation) -> None:
    assert facts_of(load, 20.0, 20.0001).lock_step is None
    far = dataclasses.replace(load, requests=load.requests[:4])
    assert facts_of(far, 0.0, 60.0).lock_step is not None


def test_a_stationary_start_of_equal_lengths_is_not_lock_step() -> None:
    """By the clock all were sent at once; by what they carry they are spread over a life."""
    steady = stationary_load(fixed_law(400), prompts(), concurrency=16, refill=2_000, seed=0, salt="s", ids=(1, 2, 3))
    lengths = [400] * 2_016
    ages = [r.context_tokens for r in steady.start]
    seen = closed_loop(Server(), lengths, n=16, ages=ages, until_s=60)
    names = [r.id for r in (*steady.start, *steady.refill)]
    seen = dataclasses.replace(
        seen, requests=tuple(dataclasses.replace(r, id=n) for r, n in zip(seen.requests, names, strict=False))
    )
    assert (facts_of(seen, 1, 21, steady).lock_step or 1) < 0.3
    assert facts_of(seen, 1, 21, steady).mean_life_s == pytest.approx(400 * 0.0116, rel=0.05)
    # The same answers, all sent when half written, march together.
    together = closed_loop(Server(), lengths, n=16, ages=[200] * 16, until_s=60)
    half = dataclasses.replace(steady, start=tuple(dataclasses.replace(r, context_tokens=200) for r in steady.start))
    together = dataclasses.replace(
        together, requests=tuple(dataclasses.replace(r, id=n) for r, n in zip(together.requests, names, strict=False))
    )
    assert (facts_of(together, 1, 21, half).lock_step or 0) > 0.9


def test_latency_is_of_what_was_sent_inside(load: Observation) -> None:
    def streamed(ttft_s: float) -> Observation:
        changed = tuple(dataclasses.replace(r, ttft_s=ttft_s if r.sent_s > 15 else 9.0) for r in load.requests)
        return dataclasses.replace(load, requests=changed)

    facts = facts_of(load, 20, 40)
    assert latency_of(load, facts) is None
    found = latency_of(streamed(0.2), facts)
    assert found is not None
    assert (found.ttft_p50_s, found.ttft_p99_s) == (pytest.approx(0.2), pytest.approx(0.2))
    assert 0.008 < found.tpot_p50_s <= found.tpot_p99_s < 0.013
    assert latency_of(streamed(0.2), dataclasses.replace(facts, generated=None)) is None


def test_a_request_that_still_waits_for_its_first_token_counts() -> None:
    server = Server()
    long = closed_loop(server, lognormal(300, 3_000, 0.3), n=8, until_s=60)
    sent = [dataclasses.replace(r, ttft_s=0.1) for r in long.requests]
    facts = facts_of(long, 20, 60)
    begun = [i for i, r in enumerate(sent) if 20 <= r.sent_s < 50]
    assert begun
    waits = dataclasses.replace(sent[begun[0]], ttft_s=None, ended_s=None)
    seen = dataclasses.replace(long, requests=tuple(waits if i == begun[0] else r for i, r in enumerate(sent)))
    found = latency_of(seen, facts)
    assert found is not None
    assert found.ttft_p99_s is not None
    assert found.ttft_p99_s > 0.5 * (long.t_s - waits.sent_s)
    # Nobody was sent inside: no time to the first token, but a pace.
    none = latency_of(dataclasses.replace(long, requests=tuple(r for r in sent if r.sent_s < 20)), facts)
    assert none is not None
    assert (none.ttft_p50_s, none.ttft_p99_s) == (None, None)
    assert none.tpot_p50_s == pytest.approx(0.0108, rel=0.05)
