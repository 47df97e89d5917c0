import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.physics.closed_loop import ClosedLoopRun, ServerSim, run_closed_loop
from autotune.physics.simulator import EngineLimits, SimRequest
from autotune.physics.steptime import StepModel

MODEL = StepModel(t0_s=0.01, sequence_s=2e-5, kv_token_s=5e-8, prefill_token_s=5e-5)
ROOM = EngineLimits(kv_tokens=200_000)
TIGHT = EngineLimits(kv_tokens=2000)


def requests(pairs: list[tuple[int, int]]) -> list[SimRequest]:
    return [SimRequest(id=str(i), prompt_tokens=p, output_tokens=o) for i, (p, o) in enumerate(pairs)]


def most_in_flight(run: ClosedLoopRun) -> int:
    """Answers sent and not ended, at the moments of sending; who ends at that very moment is gone."""
    return max(sum(f.sent_s <= at.sent_s < f.ended_s for f in run.finished) for at in run.finished)


pairs_strategy = st.lists(st.tuples(st.integers(1, 200), st.integers(2, 300)), min_size=1, max_size=25)


@given(pairs=pairs_strategy, concurrency=st.integers(1, 12), engines=st.integers(1, 3), tight=st.booleans())
@settings(max_examples=40, deadline=None)
def test_never_more_than_the_concurrency_in_flight(
    pairs: list[tuple[int, int]], concurrency: int, engines: int, tight: bool
) -> None:
    run = run_closed_loop(MODEL, TIGHT if tight else ROOM, requests(pairs), concurrency, engines=engines)
    assert most_in_flight(run) == min(concurrency, len(pairs))
    sent = sorted(run.finished, key=lambda f: int(f.request.id))
    assert [f.sent_s for f in sent] == sorted(f.sent_s for f in run.finished)
    assert run.drain_s == sent[-1].sent_s
    assert [f.ended_s for f in run.finished] == sorted(f.ended_s for f in run.finished)
    assert {f.engine for f in run.finished} <= set(range(engines))
    assert sum(f.preemptions for f in run.finished) == run.end.preemptions


@given(pairs=pairs_strategy, concurrency=st.integers(1, 12), engines=st.integers(1, 3), factor=st.floats(0.1, 10.0))
@settings(max_examples=30, deadline=None)
def test_slower_constants_stretch_time_alone(
    pairs: list[tuple[int, int]], concurrency: int, engines: int, factor: float
) -> None:
    slow = MODEL.scaled(t0_s=factor, sequence_s=factor, kv_token_s=factor, prefill_token_s=factor)
    one, two = (run_closed_loop(m, TIGHT, requests(pairs), concurrency) for m in (MODEL, slow))
    assert two.makespan_s == pytest.approx(factor * one.makespan_s, rel=1e-6)
    assert two.end.preemptions == one.end.preemptions
    several = run_closed_loop(slow, TIGHT, requests(pairs), concurrency, engines=engines)
    assert several.end.generated_tokens == one.end.generated_tokens


def test_one_at_a_time_adds_up() -> None:
    pairs = [(100, 50), (20, 5), (300, 200)]
    alone = [run_closed_loop(MODEL, ROOM, requests([pair]), 1).makespan_s for pair in pairs]
    assert run_closed_loop(MODEL, ROOM, requests(pairs), 1).makespan_s == pytest.approx(sum(alone))


def test_two_engines_are_two_servers() -> None:
    # Two in flight over two engines: each engine has one answer at a time.
    pairs = [(50, 100), (50, 100), (50, 100), (50, 100)]
    two = run_closed_loop(MODEL, ROOM, requests(pairs), 2, engines=2)
    alone = run_closed_loop(MODEL, ROOM, requests(pairs[:2]), 1)
    assert two.makespan_s == pytest.approx(alone.makespan_s)
    assert [f.engine for f in two.finished] in ([0, 1, 0, 1], [0, 1, 1, 0])


def test_a_queue_sends_requests_to_the_other_engine() -> None:
    server = ServerSim(MODEL, dataclasses.replace(ROOM, max_num_seqs=2), engines=2)
    first, second = server.engines
    for request in requests([(20, 400)] * 3):
        first.submit(request)
    for request in requests([(20, 400)] * 2):
        second.submit(request)
    server.advance(1.0)
    assert (first.waiting, second.waiting) == (1, 0)
    # 2 running + 1 waiting weighs 6, against 2, 3 and 4 there: three more go to the second, weighing 2, 3 and 4.
    for _ in range(3):
        server.submit(SimRequest(id="new", prompt_tokens=20, output_tokens=10))
    assert (first.load, second.load) == (3, 5)


def test_places_go_to_the_emptiest_cache() -> None:
    server = ServerSim(MODEL, TIGHT, engines=2)
    sizes = (900, 300, 300, 500, 1900)
    placed = [server.place(SimRequest(id=str(s), prompt_tokens=s, output_tokens=10)) for s in sizes]
    assert placed == [True, True, True, True, False]
    assert sorted(e.kv_tokens for e in server.engines) == [900, 1100]


def test_a_resident_that_can_never_end_is_refused() -> None:
    alive = SimRequest(id="r", prompt_tokens=1000, output_tokens=1500)
    assert not ServerSim(MODEL, TIGHT).place(alive)
    with pytest.raises(ValueError, match="2000 KV tokens cannot hold"):
        run_closed_loop(MODEL, TIGHT, [], 1, resident=[alive])


def test_nothing_to_send_is_no_run() -> None:
    run = run_closed_loop(MODEL, ROOM, [], 4)
    assert (run.makespan_s, run.drain_s, run.finished, run.kv_full_s) == (0.0, 0.0, (), None)


def test_samples_tell_when_the_cache_was_full() -> None:
    pairs = [(100, 400)] * 8
    run = run_closed_loop(MODEL, TIGHT, requests(pairs), 8, sample_s=0.5)
    assert run.end.preemptions > 0
    [first] = [s for s in run.samples if s.preemptions][:1]
    assert run.kv_full_s == first.t_s
    assert max(s.kv_usage for s in run.samples) > 0.9
    assert all(a.preemptions <= b.preemptions for a, b in zip(run.samples, run.samples[1:], strict=False))


def test_sampling_changes_nothing() -> None:
    pairs = [(100, 40 * i) for i in range(1, 20)]
    for engines in (1, 2):
        plain = run_closed_loop(MODEL, TIGHT, requests(pairs), 8, engines=engines)
        sampled = run_closed_loop(MODEL, TIGHT, requests(pairs), 8, engines=engines, sample_s=0.07)
        assert sampled.makespan_s == pytest.approx(plain.makespan_s)
        assert sampled.end.preemptions == plain.end.preemptions
        assert sampled.samples
        assert not plain.samples


def test_a_stopped_run_keeps_what_it_did() -> None:
    whole = run_closed_loop(MODEL, ROOM, requests([(50, 200)] * 12), 4)
    part = run_closed_loop(MODEL, ROOM, requests([(50, 200)] * 12), 4, limit_s=whole.makespan_s / 2)
    assert part.makespan_s == pytest.approx(whole.makespan_s / 2)
    assert 0 < len(part.finished) < 12
    assert part.finished == whole.finished[: len(part.finished)]


def test_computing_again_may_cost_more_than_a_prompt() -> None:
    # All are sent at once: who is preempted when depends on steps alone, so the cost is only added.
    pairs = [(100, 300 + i) for i in range(12)]
    plain, costly = (
        run_closed_loop(MODEL, dataclasses.replace(TIGHT, recompute_factor=f), requests(pairs), 12) for f in (1.0, 3.0)
    )
    assert plain.end.recomputed_tokens == costly.end.recomputed_tokens > 0
    extra = 2.0 * MODEL.prefill_token_s * plain.end.recomputed_tokens
    assert costly.makespan_s - plain.makespan_s == pytest.approx(extra)


def test_a_longer_wait_for_nothing() -> None:
    server = ServerSim(MODEL, ROOM, engines=2)
    assert server.advance(5.0) == []
    assert server.now_s == 5.0
    server.submit(SimRequest(id="x", prompt_tokens=10, output_tokens=2))
    [ended] = server.advance(math.inf)
    assert ended.sent_s == 5.0
    assert ended.ended_s == pytest.approx(5.0 + MODEL.step_s(0, 0, 10) + MODEL.step_s(1, 10))
