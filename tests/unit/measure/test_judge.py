from __future__ import annotations

import dataclasses
import math

import pytest

from autotune.measure.intervals import LOAD_SD, START_SD
from autotune.measure.judge import Known, judge
from autotune.measure.stationary import stationary_load
from autotune.measure.window import SteadyWindow
from autotune.records.codec import dumps, loads
from autotune.records.load import LoadPlan
from autotune.records.measurement import Measurement
from autotune.records.observation import Failure, Observation
from autotune.records.trial import MeasureSpec
from tests.unit.measure.loads import (
    CAPACITY,
    Server,
    closed_loop,
    ended_by,
    failing,
    lognormal,
    replay,
    so_far,
    with_samples,
)
from tests.unit.measure.long_runs import Server as Sim
from tests.unit.measure.long_runs import measured, prompts
from tests.unit.measure.test_window import rows

SPEC = MeasureSpec()
A = "a-1000req-qwen3-32b-tp8-len32768.csv"
C = "c-30req-qwen3-32b-tp4-yarn131072.csv"


@pytest.fixture(scope="module")
def whole() -> Observation:
    return closed_loop(Server(noise=0.1), lognormal(3000, 300, 0.8), n=16, until_s=120)


@pytest.fixture(scope="module")
def load(whole: Observation) -> Observation:
    return ended_by(SteadyWindow(SPEC), whole)


def test_a_steady_load(load: Observation) -> None:
    m = judge(load, SPEC, CAPACITY)
    assert (m.outcome, m.valid, m.stable, m.invalid_reasons) == ("steady", True, True, ())
    assert m.output_tokens_per_s is not None
    assert m.low is not None
    assert m.high is not None
    assert m.paired_low is not None
    assert m.paired_high is not None
    assert m.low < m.paired_low < m.output_tokens_per_s < m.paired_high < m.high
    half = (m.paired_high - m.paired_low) / 2
    unseen = 1.96 * math.hypot(LOAD_SD, START_SD)
    assert unseen <= half / m.output_tokens_per_s <= math.hypot(SPEC.interval, unseen) * 1.01
    assert m.finished_requests > 16
    assert m.failed_requests == 0
    assert m.truncated_share == 0
    assert m.running_mean == pytest.approx(16, abs=0.3)
    assert m.preemptions == 0
    rules = {"failed_requests", "engine", "stall", "preemptions", "kv", "drift", "truncation", "ttft", "tpot"}
    assert set(m.violations) == rules
    assert loads(Measurement, dumps(m)) == m


def test_forced_lengths_have_no_truncation_and_no_error_of_the_lengths(load: Observation) -> None:
    asked = {r.id: r.output_tokens or 1 for r in load.requests}
    m = judge(load, SPEC, CAPACITY, planned=asked)
    assert m.valid
    assert m.truncated_share is None
    assert (m.low, m.high) == (m.paired_low, m.paired_high)
    off = judge(load, SPEC, CAPACITY, planned={**asked, "r0": 5})
    assert (off.outcome, off.output_tokens_per_s) == ("invalid", None)
    assert off.invalid_reasons[0].startswith("lengths_off")


def test_a_saturated_load_is_judged_but_not_stable() -> None:
    full = closed_loop(Server(kv_tokens=12_000), lognormal(3000, 400, 0.8), n=64, until_s=250)
    m = judge(ended_by(SteadyWindow(SPEC), full), SPEC, CAPACITY)
    assert (m.outcome, m.stable, m.valid) == ("saturated", False, True)
    assert m.output_tokens_per_s is not None
    assert m.violations["preemptions"] > 0
    assert m.violations["kv"] > 0
    assert m.bottleneck is not None
    assert m.bottleneck.kind == "kv"
    assert any("flatters" in note for note in m.notes)


def test_one_preemption_makes_a_window_saturated_but_not_unstable(load: Observation) -> None:
    late = load.t_s - 5
    samples = [dataclasses.replace(s, preemptions=int(s.t_s > late)) for s in load.samples]
    m = judge(with_samples(load, samples), SPEC, CAPACITY)
    assert (m.outcome, m.preemptions, m.stable) == ("saturated", 1, True)


def test_a_saturated_load_without_a_settled_window_still_has_a_rate() -> None:
    # KV full from the start and the rate falling all along: no settled window, but fully in flight.
    load = closed_loop(Server(kv_tokens=12_000), lognormal(3000, 400, 0.8), n=64, until_s=60)
    fading = [dataclasses.replace(s, generation_tokens=int(1e5 * (1 - 2 ** (-s.t_s / 15)))) for s in load.samples]
    m = judge(with_samples(load, fading), SPEC, CAPACITY)
    assert (m.outcome, m.stable, m.violations["drift"]) == ("saturated", False, 1.0)
    assert m.output_tokens_per_s is not None
    assert m.window_s == pytest.approx(SPEC.window_s)


def test_a_queue_at_the_sequence_limit_is_a_steady_reading() -> None:
    queued = closed_loop(Server(max_num_seqs=8), lognormal(3000, 100, 0.8), n=32, until_s=90)
    m = judge(ended_by(SteadyWindow(SPEC), queued), SPEC, dataclasses.replace(CAPACITY, max_num_seqs=8))
    assert (m.outcome, m.stable) == ("steady", True)
    assert m.bottleneck is not None
    assert m.bottleneck.kind == "sequences"
    assert m.bottleneck.knob == "max_num_seqs"


def test_a_load_that_has_not_settled_is_never_stable() -> None:
    load = closed_loop(Server(), lognormal(500, 30_000, 0.3), n=16, until_s=60)
    m = judge(load, SPEC, CAPACITY)
    assert (m.outcome, m.stable, m.valid, m.output_tokens_per_s) == ("not_settled", False, True, None)
    assert (m.window_start_s, m.window_s, m.low) == (None, None, None)


def test_a_load_that_ran_out_says_so() -> None:
    m = judge(closed_loop(Server(), lognormal(20, 300, 0.8), n=16, until_s=90), SPEC, CAPACITY)
    assert m.outcome == "not_settled"
    assert "ran out" in m.notes[0]


def test_equal_lengths_are_lock_step() -> None:
    load = closed_loop(Server(), [400] * 3000, n=16, until_s=100)
    m = judge(ended_by(SteadyWindow(SPEC), load), SPEC, CAPACITY)
    assert (m.outcome, m.valid, m.output_tokens_per_s) == ("invalid", False, None)
    assert m.invalid_reasons[0].startswith("lock_step")
    # Many rounds inside the window: whole rounds dominate.
    short = closed_loop(Server(), [100] * 3000, n=16, until_s=100)
    assert judge(ended_by(SteadyWindow(SPEC), short), SPEC, CAPACITY).valid


def test_a_dead_engine_and_a_stall_are_failed(load: Observation) -> None:
    failure = Failure(kind="oom", line="CUDA out of memory")
    m = judge(dataclasses.replace(load, end="engine_died", failure=failure), SPEC, CAPACITY)
    assert (m.outcome, m.stable, m.failure, m.violations["engine"]) == ("failed", False, failure, 1.0)
    assert m.output_tokens_per_s is None
    m = judge(dataclasses.replace(load, end="stalled"), SPEC, CAPACITY)
    assert (m.outcome, m.stable, m.violations["stall"]) == ("failed", False, 1.0)


def test_failing_requests_fail_the_load(whole: Observation) -> None:
    load = ended_by(SteadyWindow(SPEC), failing(whole, [r.id for r in whole.requests]))
    m = judge(load, SPEC, CAPACITY)
    assert (m.outcome, m.stable, m.errors) == ("failed", False, {"server": m.failed_requests})
    assert m.failure is not None
    assert "500: broken" in m.failure.line


def test_a_few_failed_requests_are_a_violation(load: Observation) -> None:
    m = judge(failing(load, ["r3"], kind="timeout"), SPEC, CAPACITY)
    assert (m.outcome, m.valid, m.stable) == ("steady", True, False)
    assert m.violations["failed_requests"] > 0
    assert m.errors == {"timeout": 1}


def test_a_refused_first_request_is_nobodys_data(load: Observation) -> None:
    refused = dataclasses.replace(
        failing(so_far(load, 0.5), ["r0"], kind="client"),
        end="stopped:client_error",
        failure=Failure(kind="unknown", line="400: no such model"),
    )
    m = judge(refused, SPEC, CAPACITY)
    assert (m.outcome, m.valid) == ("invalid", False)
    assert "no such model" in m.invalid_reasons[0]


def test_a_reset_counter_is_invalid_and_never_negative(load: Observation) -> None:
    samples = [
        s if s.t_s < 15 else dataclasses.replace(s, generation_tokens=(s.generation_tokens or 0) - 10_000)
        for s in load.samples
    ]
    m = judge(with_samples(load, samples), SPEC, CAPACITY)
    assert (m.outcome, m.output_tokens_per_s) == ("invalid", None)
    assert m.invalid_reasons[0].startswith("counters_reset")


def test_without_metrics_the_number_carries_a_note(whole: Observation) -> None:
    m = judge(with_samples(whole, []), SPEC, CAPACITY)
    assert (m.outcome, m.valid, m.kv_usage_max, m.preemptions) == ("steady", True, None, None)
    assert "no server metrics" in m.notes[0]


def test_a_window_of_few_readings_is_invalid(whole: Observation) -> None:
    sparse = with_samples(whole, whole.samples[::10])
    m = judge(sparse, SPEC, CAPACITY)
    assert m.outcome == "invalid"
    assert any(reason.startswith("few_samples") for reason in m.invalid_reasons)


def test_one_answer_has_no_spread_of_lengths() -> None:
    n1 = closed_loop(Server(), [900] * 3, n=1, until_s=30)
    m = judge(n1, dataclasses.replace(SPEC, window_s=8.0), CAPACITY)
    assert m.outcome == "steady"
    assert m.paired_low is not None
    one = closed_loop(Server(), [900, 5000], n=1, until_s=30)
    m = judge(one, dataclasses.replace(SPEC, window_s=8.0), CAPACITY)
    assert m.outcome == "steady"
    assert m.paired_low is not None
    assert m.low is None


def test_streamed_answers_have_latencies(load: Observation) -> None:
    streamed = dataclasses.replace(
        load, requests=tuple(dataclasses.replace(r, ttft_s=0.2, itl_s=0.01) for r in load.requests)
    )
    latency = judge(streamed, SPEC, CAPACITY).latency
    assert latency is not None
    assert latency.ttft_p50_s == pytest.approx(0.2)
    assert 0.008 < latency.tpot_p50_s <= latency.tpot_p99_s < 0.02
    assert judge(load, SPEC, CAPACITY).latency is None


@pytest.mark.parametrize("t_s", [60.0, 120.0, 180.0, 300.0])
def test_the_first_minutes_of_a_real_run_are_neither_steady_nor_stable(t_s: float) -> None:
    m = judge(replay(rows(A), until_s=t_s), SPEC, CAPACITY)
    assert (m.outcome, m.stable, m.output_tokens_per_s) == ("not_settled", False, None)
    # From three minutes on its pace says that the cache will be full.
    assert (m.bottleneck is not None and m.bottleneck.kind == "kv") == (t_s >= 180)


@pytest.mark.parametrize("t_s", [460.0, 900.0, None])
def test_a_real_run_with_a_full_cache_is_saturated_and_kv_is_named(t_s: float | None) -> None:
    m = judge(replay(rows(A), until_s=t_s), SPEC, CAPACITY)
    assert (m.outcome, m.stable) == ("saturated", False)
    assert m.bottleneck is not None
    assert m.bottleneck.kind == "kv"
    assert m.violations["kv"] > 0


def test_thirty_long_answers_never_settle() -> None:
    m = judge(replay(rows(C)), SPEC, CAPACITY)
    assert (m.outcome, m.stable, m.bottleneck) == ("not_settled", False, None)


@pytest.mark.parametrize("name", [A, C])
def test_no_moment_of_a_real_run_reads_as_stable(name: str) -> None:
    """Timeline a looks healthy for 410 s (nothing waits), c drains from its first end."""
    table = rows(name)
    for row in table:
        t_s = float(row["t_s"])
        m = judge(replay(table, until_s=t_s), SPEC, CAPACITY)
        assert not m.stable
        assert m.outcome in ("not_settled", "saturated")
        if m.outcome == "saturated":
            assert name == A
            assert t_s > 380  # over 95 % of the cache, seconds before the first preemption
            assert m.bottleneck is not None
            assert m.bottleneck.kind == "kv"


def test_the_verdict_of_the_live_rule_on_a_real_run_names_the_cache() -> None:
    seen = ended_by(SteadyWindow(SPEC), replay(rows(A)))
    m = judge(seen, SPEC, CAPACITY)
    assert (seen.end, m.outcome, m.stable) == ("stopped:not_settled", "not_settled", False)
    assert m.bottleneck is not None
    assert m.bottleneck.kind == "kv"
    assert "full in about" in m.bottleneck.evidence
    patient = dataclasses.replace(SPEC, settle_limit_s=450.0)
    m = judge(ended_by(SteadyWindow(patient), replay(rows(A))), patient, CAPACITY)
    assert (m.outcome, m.stable) == ("saturated", False)
    assert m.bottleneck is not None
    assert m.bottleneck.kind == "kv"


@pytest.fixture(scope="module")
def server() -> Sim:
    return Sim(tp=1, mean=1_000, seed=3)


def test_a_load_in_its_steady_state_is_judged_by_its_law(server: Sim) -> None:
    small, load = measured(server, server.known(), concurrencies=[16, 120], prior=server.physics)
    assert (load.outcome, load.valid, load.stable) == ("steady", True, True)
    assert load.load_s < 60
    assert load.correction is not None
    assert load.output_tokens_per_s == pytest.approx(
        load.correction.window_tokens_per_s * load.correction.factor, rel=1e-9
    )
    assert (load.low, load.high) == (load.paired_low, load.paired_high)  # nothing about the lengths is in doubt
    assert load.truncated_share == server.law.cut_share > 0
    assert load.mean_output_tokens == pytest.approx(server.law.mean)
    assert small.output_tokens_per_s is not None
    assert load.output_tokens_per_s is not None
    assert small.output_tokens_per_s < load.output_tokens_per_s
    assert load.bottleneck is not None
    assert load.bottleneck.kind == "bandwidth"
    assert loads(Measurement, dumps(load)) == load


def test_lengths_from_a_probe_widen_the_forecast_s_interval_alone(server: Sim) -> None:
    (load,) = measured(server, server.probe(64), concurrencies=[100], prior=server.physics)
    assert load.low is not None
    assert load.high is not None
    assert load.paired_low is not None
    assert load.paired_high is not None
    assert load.low < load.paired_low
    assert load.paired_high < load.high


def test_truncation_by_the_law_can_be_a_violation(server: Sim) -> None:
    strict = dataclasses.replace(SPEC, truncation_limit=0.01)
    (load,) = measured(server, server.known(), concurrencies=[30], prior=None, spec=strict)
    assert load.violations["truncation"] == pytest.approx(server.law.cut_share / 0.01 - 1)
    assert not load.stable


def test_more_in_flight_than_the_cache_holds_is_said_and_saturated(server: Sim) -> None:
    (load,) = measured(server, server.known(), concurrencies=[2 * server.concurrency], prior=server.physics)
    assert (load.outcome, load.stable, load.correction) == ("saturated", False, None)
    assert load.output_tokens_per_s is not None
    assert any("was foreseen" in note for note in load.notes)


def test_a_server_that_answers_other_lengths_than_were_forced_is_invalid(server: Sim) -> None:
    """A model that stops at its own end in spite of ``ignore_eos``."""
    with server.engine.session(server.settings) as session:
        steady = stationary_load(server.law, prompts(), concurrency=20, refill=400, seed=0, salt="s", ids=(1, 2, 3))
        known = Known(load=steady, answers=server.known())
        seen = session.observe(
            LoadPlan(start=steady.start, refill=steady.refill), stop=SteadyWindow(SPEC, start="stationary")
        )
        early = tuple(
            dataclasses.replace(r, output_tokens=r.output_tokens - 1) if r.output_tokens else r for r in seen.requests
        )
        m = judge(dataclasses.replace(seen, requests=early), SPEC, session.capacity, known=known)
    assert m.outcome == "invalid"
    assert m.invalid_reasons[0].startswith("lengths_off")


def test_answers_from_an_earlier_load_s_cache_are_invalid(server: Sim) -> None:
    with server.engine.session(server.settings) as session:
        steady = stationary_load(server.law, prompts(), concurrency=20, refill=400, seed=0, salt="s", ids=(1, 2, 3))
        known = Known(load=steady, answers=server.known())
        seen = session.observe(
            LoadPlan(start=steady.start, refill=steady.refill), stop=SteadyWindow(SPEC, start="stationary")
        )
        again = [
            dataclasses.replace(s, prefix_queries=s.prompt_tokens, prefix_hits=(s.prompt_tokens or 0) // 2)
            for s in seen.samples
        ]
        m = judge(with_samples(seen, again), SPEC, session.capacity, known=known)
    assert m.outcome == "invalid"
    assert any(reason.startswith("prefix_reuse") for reason in m.invalid_reasons)
