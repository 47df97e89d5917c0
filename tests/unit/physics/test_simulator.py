import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.physics.closed_loop import ClosedLoopRun, ServerSim, run_closed_loop
from autotune.physics.simulator import EngineLimits, EngineSim, SimRequest
from autotune.physics.steptime import StepModel
from tests.unit.physics import stepper

MODEL = StepModel(t0_s=0.01, sequence_s=2e-5, kv_token_s=5e-8, prefill_token_s=5e-5)


def requests(pairs: list[tuple[int, int]]) -> list[SimRequest]:
    return [SimRequest(id=str(i), prompt_tokens=p, output_tokens=o) for i, (p, o) in enumerate(pairs)]


def random_case(seed: int) -> tuple[StepModel, dict[str, float], list[tuple[int, int]], int]:
    """Constants, limits, (prompt, output) pairs and a concurrency; most of them preempt."""
    rng = random.Random(seed)
    model = StepModel(
        t0_s=rng.uniform(0.005, 0.03),
        sequence_s=rng.uniform(5e-6, 1e-4),
        kv_token_s=10 ** rng.uniform(-8.5, -6.5),
        prefill_token_s=rng.uniform(1e-5, 2e-4),
        beyond_s=rng.choice([0.0, 5e-5]),
        graph_limit=rng.choice([8, 512]),
    )
    mean, sigma = rng.choice([30, 120, 400]), rng.uniform(0.1, 1)
    pairs = [
        (rng.randint(1, 200), max(1, min(1500, int(rng.lognormvariate(0, sigma) * mean))))
        for _ in range(rng.randint(20, 80))
    ]
    largest = max(p + o for p, o in pairs) + 16
    limits = {
        "kv_tokens": int(rng.choice([1, 1.3, 2, 5]) * max(1500, largest)),
        "max_num_seqs": rng.choice([4, 16, 64]),
        "max_num_batched_tokens": rng.choice([64, 128, 512, 2048]),
        "hit_share": rng.choice([0.0, 0.3, 0.8]),
    }
    return model, limits, pairs, rng.choice([1, 5, 20, 64])


def run_both(seed: int) -> tuple[stepper.Stepper, list[stepper.Sequence], ClosedLoopRun]:
    model, limits, pairs, concurrency = random_case(seed)
    exact = stepper.Stepper(step_s=model.step_s, **limits)  # type: ignore[arg-type]
    ended = stepper.run(exact, pairs, concurrency)
    return exact, ended, run_closed_loop(model, EngineLimits(**limits), requests(pairs), concurrency)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(40))
def test_jumps_agree_with_single_steps(seed: int) -> None:
    exact, ended, run = run_both(seed)
    assert run.makespan_s == pytest.approx(exact.now, rel=0.01)
    assert abs(run.end.preemptions - exact.preemptions) <= max(5, 0.08 * exact.preemptions)
    # The arithmetic is the same, so it is in fact equal, request by request.
    assert run.makespan_s == pytest.approx(exact.now, rel=1e-9)
    assert run.end.preemptions == exact.preemptions
    assert [int(f.request.id) for f in run.finished] == [s.number for s in ended]


def test_the_cases_do_preempt() -> None:
    assert sum(run_both(seed)[0].preemptions for seed in range(10)) > 100


pairs_strategy = st.lists(st.tuples(st.integers(1, 300), st.integers(1, 400)), min_size=1, max_size=30)


@given(
    pairs=pairs_strategy,
    concurrency=st.integers(1, 40),
    kv=st.integers(720, 6000),
    engines=st.integers(1, 3),
    hit=st.floats(0, 1),
)
@settings(max_examples=50, deadline=None)
def test_tokens_are_conserved_and_time_has_floors(
    pairs: list[tuple[int, int]], concurrency: int, kv: int, engines: int, hit: float
) -> None:
    limits = EngineLimits(kv_tokens=kv, hit_share=hit)
    run = run_closed_loop(MODEL, limits, requests(pairs), concurrency, engines=engines)
    written = sum(o for _, o in pairs)
    assert run.end.generated_tokens == written
    # Prompts lost half-way by a preemption are computed again, not twice for the first time.
    assert run.end.prompt_tokens <= sum(p for p, _ in pairs)
    assert run.end.prompt_tokens + run.end.recomputed_tokens >= sum(p for p, _ in pairs) * (1 - hit)
    assert (run.end.running, run.end.waiting, run.end.kv_tokens, run.end.kv_usage) == (0, 0, 0, 0.0)
    assert sorted(int(f.request.id) for f in run.finished) == list(range(len(pairs)))
    # No answer is faster than its steps alone, nor all of them than the best rate of all engines.
    assert run.makespan_s >= max(o for _, o in pairs) * MODEL.step_s(1, 0)
    most = min(concurrency, len(pairs)) / engines
    roofline = engines * max(1.0, most) / MODEL.base_s(max(1.0, most))
    assert run.makespan_s >= (written - len(pairs)) / roofline * 0.999
    assert all(f.sent_s <= f.started_s <= f.ended_s for f in run.finished)
    assert run.makespan_s == max(f.ended_s for f in run.finished)


@given(pairs=pairs_strategy, concurrency=st.integers(1, 40), kv=st.integers(720, 4000), more=st.integers(1, 4000))
@settings(max_examples=50, deadline=None)
def test_more_cache_is_never_much_slower(pairs: list[tuple[int, int]], concurrency: int, kv: int, more: int) -> None:
    small = run_closed_loop(MODEL, EngineLimits(kv_tokens=kv), requests(pairs), concurrency)
    large = run_closed_loop(MODEL, EngineLimits(kv_tokens=kv + more), requests(pairs), concurrency)
    # A batch that differs by one step of the longest answer is within it.
    assert large.makespan_s <= small.makespan_s * 1.02 + MODEL.step_s(40, kv, 300)


def test_one_request_by_hand() -> None:
    run = run_closed_loop(MODEL, EngineLimits(kv_tokens=1000), requests([(100, 3)]), 1)
    prefill = MODEL.step_s(0, 0, 100)
    assert run.makespan_s == pytest.approx(prefill + MODEL.step_s(1, 100) + MODEL.step_s(1, 101))


def test_prompts_are_chunked_beside_decoding() -> None:
    limits = EngineLimits(kv_tokens=10_000, max_num_batched_tokens=64, max_num_seqs=8)
    engine = EngineSim(MODEL, limits)
    engine.submit(SimRequest(id="a", prompt_tokens=100, output_tokens=5))
    ended = []
    while engine.running or engine.waiting or not ended:
        ended += engine.advance(engine.next_s())
    # 64 + 36 prompt tokens, then four more tokens.
    expected = MODEL.step_s(0, 0, 64) + MODEL.step_s(0, 64, 36) + sum(MODEL.step_s(1, 100 + i) for i in range(4))
    assert ended[0].ended_s == pytest.approx(expected)


def test_the_newest_is_preempted_and_computed_again() -> None:
    run = run_closed_loop(MODEL, EngineLimits(kv_tokens=320), requests([(100, 150), (100, 150)]), 2)
    by_id = {f.request.id: f for f in run.finished}
    assert by_id["0"].preemptions == 0
    assert by_id["1"].preemptions >= 1
    assert by_id["0"].ended_s < by_id["1"].ended_s
    assert run.end.recomputed_tokens > 100


def test_prefix_cache_hits_spare_recomputation() -> None:
    cold = run_closed_loop(MODEL, EngineLimits(kv_tokens=320), requests([(100, 150)] * 4), 4)
    warm = run_closed_loop(MODEL, EngineLimits(kv_tokens=320, hit_share=0.8), requests([(100, 150)] * 4), 4)
    assert warm.end.recomputed_tokens < 0.5 * cold.end.recomputed_tokens
    assert warm.makespan_s < cold.makespan_s


def test_the_sequence_limit_queues() -> None:
    engine = EngineSim(MODEL, EngineLimits(kv_tokens=10_000, max_num_seqs=2))
    for request in requests([(10, 50)] * 3):
        engine.submit(request)
    engine.advance(0.05)
    assert (engine.running, engine.waiting, engine.load) == (2, 1, 3)
    assert engine.kv_usage == pytest.approx(2 / 625, abs=0.01)


def test_advance_stops_at_the_first_end_and_at_the_time() -> None:
    engine = EngineSim(MODEL, EngineLimits(kv_tokens=10_000))
    for request in requests([(10, 20), (10, 40)]):
        engine.submit(request)
    assert [f.request.id for f in engine.advance(100.0)] == ["0"]
    at = engine.now_s
    assert engine.advance(at + 0.1) == []
    assert at + 0.1 - MODEL.step_s(1, 100) <= engine.now_s <= at + 0.1
    assert [f.request.id for f in engine.advance(100.0)] == ["1"]
    assert engine.advance(100.0) == []
    assert engine.now_s == 100.0


def test_a_request_sent_later_waits_for_its_time() -> None:
    engine = EngineSim(MODEL, EngineLimits(kv_tokens=10_000))
    engine.submit(SimRequest(id="a", prompt_tokens=10, output_tokens=2), at_s=5.0)
    assert engine.next_s() == 5.0
    [ended] = engine.advance(10.0)
    assert ended.sent_s == ended.started_s == 5.0
    assert ended.ended_s == pytest.approx(5.0 + MODEL.step_s(0, 0, 10) + MODEL.step_s(1, 10))


def test_a_request_that_comes_during_a_jump_is_admitted_at_a_step_end() -> None:
    engine = EngineSim(MODEL, EngineLimits(kv_tokens=10_000))
    engine.submit(SimRequest(id="long", prompt_tokens=10, output_tokens=1000))
    engine.advance(0.5)
    before = engine.next_s()
    engine.submit(SimRequest(id="late", prompt_tokens=10, output_tokens=2), at_s=1.0)
    assert engine.next_s() < before
    [ended] = engine.advance(100.0)
    assert ended.request.id == "late"
    assert 1.0 <= ended.started_s <= 1.0 + MODEL.step_s(1, 500)


def test_placed_requests_need_no_prefill() -> None:
    engine = EngineSim(MODEL, EngineLimits(kv_tokens=1600))
    assert engine.place(SimRequest(id="a", prompt_tokens=1000, output_tokens=10))
    assert not engine.place(SimRequest(id="b", prompt_tokens=1000, output_tokens=10))
    assert engine.kv_tokens == 1000
    [ended] = engine.advance(100.0)
    assert ended.ended_s == pytest.approx(sum(MODEL.step_s(1, 1000 + i) for i in range(10)))
    assert engine.prompt_tokens == 0


def test_noise_stretches_time() -> None:
    quiet = run_closed_loop(MODEL, EngineLimits(kv_tokens=100_000), requests([(50, 3000)] * 8), 8)
    noisy = run_closed_loop(MODEL, EngineLimits(kv_tokens=100_000), requests([(50, 3000)] * 8), 8, noise=lambda: 1.25)
    assert noisy.makespan_s == pytest.approx(1.25 * quiet.makespan_s)
    rng = random.Random(0)
    asked = []

    def factor() -> float:
        asked.append(rng.uniform(0.9, 1.1))
        return asked[-1]

    run = run_closed_loop(MODEL, EngineLimits(kv_tokens=100_000), requests([(50, 3000)] * 8), 8, noise=factor)
    assert len(asked) == pytest.approx(run.makespan_s, rel=0.1)
    assert run.makespan_s == pytest.approx(quiet.makespan_s, rel=0.03)


@pytest.mark.parametrize(
    "request_",
    [SimRequest(id="x", prompt_tokens=0, output_tokens=1), SimRequest(id="x", prompt_tokens=1, output_tokens=0)],
)
def test_empty_requests_are_refused(request_: SimRequest) -> None:
    with pytest.raises(ValueError, match="at least one token"):
        EngineSim(MODEL, EngineLimits(kv_tokens=100)).submit(request_)


def test_what_cannot_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="100 KV tokens cannot hold"):
        EngineSim(MODEL, EngineLimits(kv_tokens=100)).submit(SimRequest(id="x", prompt_tokens=50, output_tokens=60))
    with pytest.raises(ValueError, match="at least one KV block"):
        EngineSim(MODEL, EngineLimits(kv_tokens=5))
    with pytest.raises(ValueError, match="at least one engine"):
        ServerSim(MODEL, EngineLimits(kv_tokens=100), engines=0)
    with pytest.raises(ValueError, match="concurrency must be at least 1"):
        run_closed_loop(MODEL, EngineLimits(kv_tokens=100), [], 0)


def test_the_client_holds_n_in_flight_until_nothing_is_left() -> None:
    run = run_closed_loop(
        MODEL, EngineLimits(kv_tokens=100_000), requests([(20, 100 + i) for i in range(30)]), 8, sample_s=0.25
    )
    full = [s for s in run.samples if s.t_s <= run.drain_s]
    assert full
    assert all(s.running + s.waiting == 8 for s in full)
    assert [s.t_s for s in run.samples] == pytest.approx([0.25 * (i + 1) for i in range(len(run.samples))])
    tokens = [s.generated_tokens for s in run.samples]
    assert tokens == sorted(tokens)
    assert 0 < run.drain_s < run.makespan_s
    assert run.kv_full_s is None


def test_engines_share_the_load() -> None:
    pairs = [(20, 200)] * 40
    one = run_closed_loop(MODEL, EngineLimits(kv_tokens=50_000), requests(pairs), 20)
    two = run_closed_loop(MODEL, EngineLimits(kv_tokens=50_000), requests(pairs), 20, engines=2)
    assert two.makespan_s < one.makespan_s
    shares = [sum(f.engine == i for f in two.finished) for i in range(2)]
    assert shares == [20, 20]


def test_samples_of_several_engines_are_sums_at_one_time() -> None:
    server = ServerSim(MODEL, EngineLimits(kv_tokens=50_000), engines=2)
    for request in requests([(20, 400)] * 3):
        server.submit(request)
    assert server.advance(1.0) == []
    sample = server.sample
    assert (sample.t_s, sample.running) == (1.0, 3)
    assert sample.generated_tokens == sum(e.generated_tokens for e in server.engines)
    assert sample.kv_usage == max(e.kv_usage for e in server.engines)
    server.submit(SimRequest(id="late", prompt_tokens=20, output_tokens=5), at_s=1.5)
    [ended] = server.advance(100.0)
    assert (ended.request.id, ended.engine) == ("late", 1)


def test_a_run_under_way_goes_on_from_its_state() -> None:
    alive = [SimRequest(id=f"r{i}", prompt_tokens=500, output_tokens=300) for i in range(4)]
    run = run_closed_loop(
        MODEL, EngineLimits(kv_tokens=2600), requests([(20, 50)] * 2), 5, resident=alive, sample_s=0.1
    )
    assert {f.request.id for f in run.finished} == {"r0", "r1", "r2", "r3", "0", "1"}
    assert run.end.generated_tokens == 4 * 300 + 2 * 50
    # Four of 500 and 300 more do not fit 2,600 tokens: the newest are preempted, later computed again.
    assert run.end.preemptions > 0
    assert run.kv_full_s is not None


def test_residents_without_room_wait_first() -> None:
    alive = [SimRequest(id=f"r{i}", prompt_tokens=500, output_tokens=50) for i in range(4)]
    run = run_closed_loop(MODEL, EngineLimits(kv_tokens=1200), requests([(20, 50)]), 5, resident=alive)
    assert [f.request.id for f in run.finished][:2] == ["r0", "r1"]
    assert len(run.finished) == 5


def test_a_run_may_be_stopped() -> None:
    run = run_closed_loop(MODEL, EngineLimits(kv_tokens=50_000), requests([(20, 5000)] * 4), 4, limit_s=2.0)
    assert run.makespan_s == 2.0
    assert run.end.running == 4
