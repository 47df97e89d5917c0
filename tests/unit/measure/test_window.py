from __future__ import annotations

import csv
import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autotune
from autotune.measure.window import SteadyWindow, View
from autotune.records.observation import Observation
from autotune.records.trial import MeasureSpec
from tests.unit.measure.loads import (
    Server,
    closed_loop,
    ended_by,
    failing,
    lognormal,
    replay,
    so_far,
    with_samples,
)

SPEC = MeasureSpec()
FIELD = Path(os.environ.get("AUTOTUNE_FIELD", Path(autotune.__file__).parents[1] / "../shared/field"))


def steady(n: int = 16, until_s: float = 120, **server: float) -> Observation:
    return closed_loop(Server(noise=0.1, **server), lognormal(3000, 300, 0.8), n=n, until_s=until_s)


def test_a_window_opens_after_the_turnover_and_closes_on_its_interval() -> None:
    load = ended_by(SteadyWindow(SPEC), steady())
    view = View(load)
    window = view.window(SPEC, "fresh")
    assert load.end == "stopped:steady"
    assert window is not None
    assert view.turned_over_s is not None
    assert window.start_s >= view.turned_over_s > 3
    assert SPEC.window_s * 0.9 <= window.seconds <= SPEC.window_limit_s
    assert window.narrow(SPEC.interval)
    assert window.source == "server"


def test_the_rate_is_the_long_run_truth_though_the_ramp_is_faster() -> None:
    server = Server(step_s=0.01, per_kv_token_s=4e-7, noise=0.05)
    load = closed_loop(server, lognormal(4000, 400, 0.6), n=32, until_s=300)
    tokens = {round(s.t_s): s.generation_tokens or 0 for s in load.samples}
    truth = (tokens[290] - tokens[90]) / 200
    ramp = (tokens[4] - tokens[1]) / 3
    window = View(ended_by(SteadyWindow(SPEC), load)).window(SPEC, "fresh")
    assert ramp > 1.06 * truth
    assert window is not None
    assert window.rate.per_s == pytest.approx(truth, rel=0.03)


def test_turnover_needs_nine_of_ten_of_the_first_wave() -> None:
    # One of sixteen may be left, two may not: 14 short first answers, two that take 100 s.
    lengths = [100] * 14 + [8000, 8000] + [100] * 3000
    load = closed_loop(Server(), lengths, n=16, until_s=60)
    assert View(load).turned_over_s is None
    lengths[14] = 100
    assert View(closed_loop(Server(), lengths, n=16, until_s=60)).turned_over_s is not None


def test_before_the_turnover_there_is_no_window() -> None:
    load = steady()
    turnover = View(load).turned_over_s
    assert turnover is not None
    for t in (1.0, turnover - 0.5):
        assert View(so_far(load, t)).window(SPEC, "fresh") is None


def test_the_drain_is_never_inside() -> None:
    load = closed_loop(Server(), lognormal(400, 300, 0.5), n=16, until_s=300)
    view = View(load)
    window = view.window(SPEC, "fresh")
    assert load.end == "drained"
    assert window is not None
    last_send = max(r.sent_s for r in load.requests)
    assert window.end_s <= view.full_until_s
    assert view.full_until_s >= last_send
    assert view.full_until_s < load.t_s


def test_a_drain_from_the_first_end_on_has_no_window() -> None:
    load = ended_by(SteadyWindow(SPEC), closed_loop(Server(), lognormal(32, 3000, 0.8), n=32, until_s=400))
    assert View(load).window(SPEC, "fresh") is None
    assert load.end in ("stopped:not_settled", "drained")


def test_a_window_that_cannot_grow_ends_the_load() -> None:
    lengths = [*lognormal(700, 150, 0.5), 3000]
    noisy = closed_loop(Server(noise=1.5), lengths, n=16, until_s=300)
    spec = dataclasses.replace(SPEC, interval=0.0001, window_limit_s=1000)
    assert ended_by(SteadyWindow(spec), noisy).end == "stopped:ran_out"


def test_a_wide_interval_ends_at_the_window_limit() -> None:
    spec = dataclasses.replace(SPEC, interval=1e-6, window_s=10, window_limit_s=25)
    load = ended_by(SteadyWindow(spec), steady())
    window = View(load).window(spec, "fresh")
    assert load.end == "stopped:window_limit"
    assert window is not None
    assert 22 <= window.seconds <= 25


def test_long_answers_do_not_settle_and_are_given_up_early_when_known() -> None:
    load = closed_loop(Server(), lognormal(500, 30_000, 0.3), n=16, until_s=250)
    late = ended_by(SteadyWindow(SPEC), load)
    early = ended_by(SteadyWindow(SPEC, expected_output_tokens=30_000), load)
    assert late.end == early.end == "stopped:not_settled"
    assert late.t_s == pytest.approx(SPEC.settle_limit_s, abs=1.5)
    assert early.t_s < SPEC.window_s + 2
    # Short ones are not given up for being expected.
    assert ended_by(SteadyWindow(SPEC, expected_output_tokens=300), steady()).end == "stopped:steady"


def test_a_rate_that_keeps_falling_does_not_settle() -> None:
    load = steady(until_s=200)
    fading = [dataclasses.replace(s, generation_tokens=int(100_000 * (1 - 2 ** (-s.t_s / 10)))) for s in load.samples]
    cut = ended_by(SteadyWindow(SPEC), with_samples(load, fading))
    assert cut.end == "stopped:not_settled"
    assert cut.t_s == pytest.approx(SPEC.settle_limit_s, abs=3)


def test_a_step_moves_the_start_of_the_window_past_it() -> None:
    load = steady(until_s=200)
    step = [dataclasses.replace(s, generation_tokens=int(1000 * s.t_s + 1000 * min(s.t_s, 20))) for s in load.samples]
    window = View(ended_by(SteadyWindow(SPEC), with_samples(load, step))).window(SPEC, "fresh")
    assert window is not None
    assert window.start_s > 15
    assert window.rate.per_s == pytest.approx(1000, rel=0.07)


def test_a_full_cache_is_saturated() -> None:
    load = closed_loop(Server(kv_tokens=12_000), lognormal(3000, 400, 0.8), n=64, until_s=250)
    cut = ended_by(SteadyWindow(SPEC), load)
    assert cut.end == "stopped:saturated"
    assert cut.t_s < 60


def test_preemption_alone_is_saturated_too() -> None:
    load = closed_loop(Server(kv_tokens=12_000), lognormal(3000, 400, 0.8), n=64, until_s=250)
    blind = with_samples(load, [dataclasses.replace(s, kv_usage=None) for s in load.samples])
    assert ended_by(SteadyWindow(SPEC), blind).end == "stopped:saturated"


def test_a_full_cache_of_equally_young_answers_passes() -> None:
    # Nearly equal lengths reach their full length together (40 x 1,100) and need half of that later on.
    lengths = lognormal(3000, 1000, 0.15)
    load = closed_loop(Server(kv_tokens=46_000), lengths, n=40, until_s=250)
    view = View(load)
    peak = max(load.samples, key=lambda s: s.kv_usage or 0)
    assert peak.t_s < 20
    assert view.turned_over_s is not None
    spec = dataclasses.replace(SPEC, kv_limit=0.9 * (peak.kv_usage or 0), window_s=3)
    early = so_far(load, peak.t_s + 1)
    assert early.t_s < view.turned_over_s
    assert View(early).saturated_span(spec) is not None
    assert SteadyWindow(spec)(early) is None


def test_a_counter_that_goes_backwards_ends_the_load() -> None:
    load = steady()
    samples = [
        s if s.t_s < 10 else dataclasses.replace(s, generation_tokens=(s.generation_tokens or 0) - 5000)
        for s in load.samples
    ]
    cut = ended_by(SteadyWindow(SPEC), with_samples(load, samples))
    assert cut.end == "stopped:counters_reset"
    assert cut.t_s == pytest.approx(10, abs=1.5)


def test_failures_of_every_lane_end_the_load_and_a_few_do_not() -> None:
    load = steady()
    assert ended_by(SteadyWindow(SPEC), failing(load, [r.id for r in load.requests])).end == "stopped:failing"
    assert ended_by(SteadyWindow(SPEC), failing(load, ["r3", "r9"])).end == "stopped:steady"


def test_without_server_counters_the_client_counts() -> None:
    load = with_samples(steady(), [])
    window = View(load).window(SPEC, "fresh")
    truth = View(steady()).window(SPEC, "fresh")
    assert window is not None
    assert truth is not None
    assert window.source == "client"
    assert window.rate.per_s == pytest.approx(truth.rate.per_s, rel=0.15)


def test_an_empty_observation_goes_on() -> None:
    nothing = dataclasses.replace(steady(until_s=1), samples=(), requests=(), t_s=0.0)
    assert SteadyWindow(SPEC)(nothing) is None
    assert SteadyWindow(SPEC, expected_output_tokens=1e9)(dataclasses.replace(nothing, t_s=30.0)) is None


def test_a_stationary_start_opens_when_the_burst_is_over() -> None:
    lengths, ages = lognormal(400, 2000, 0.8), lognormal(32, 900, 0.8, seed=4)
    load = closed_loop(
        Server(noise=0.05),
        [a + b for a, b in zip(lengths, [*ages, *[0] * 400], strict=False)],
        n=32,
        until_s=100,
        ages=ages,
    )
    slow = [
        dataclasses.replace(s, waiting=20, running=12, generation_tokens=int((s.generation_tokens or 0) * 0.1))
        if s.t_s < 8
        else s
        for s in load.samples
    ]
    burst = with_samples(load, slow)
    cut = ended_by(SteadyWindow(SPEC, start="stationary"), burst)
    window = View(cut).window(SPEC, "stationary")
    assert View(cut).turned_over_s is None
    assert cut.end == "stopped:steady"
    assert window is not None
    assert 8 <= window.start_s <= 11
    assert View(so_far(burst, 7)).opening_s("stationary") is None


def test_a_burst_that_does_not_end_is_a_queue() -> None:
    load = closed_loop(Server(max_num_seqs=8), lognormal(3000, 100, 0.5), n=32, until_s=90)
    assert View(load).burst_over_s == pytest.approx(60.0, abs=1.1)


def test_the_rule_is_pure_and_the_verdict_the_same_for_the_cut_load() -> None:
    load, rule = steady(), SteadyWindow(SPEC)
    cut = ended_by(rule, load)
    assert rule(dataclasses.replace(cut, end="running")) == rule(dataclasses.replace(cut, end="running")) == "steady"


@given(st.integers(0, 10**6), st.sampled_from([1, 4, 16]), st.floats(0.05, 1.2))
@settings(max_examples=15, deadline=None)
def test_a_window_lies_between_turnover_and_drain(seed: int, n: int, sigma: float) -> None:
    load = closed_loop(Server(noise=0.2), lognormal(300, 120, sigma, seed), n=n, until_s=90, seed=seed)
    view = View(load)
    window = view.window(SPEC, "fresh")
    if window is not None:
        assert view.turned_over_s is not None
        assert view.turned_over_s <= window.start_s < window.end_s <= view.full_until_s <= load.t_s
        assert window.seconds <= SPEC.window_limit_s


def rows(name: str) -> list[dict[str, str]]:
    path = FIELD / "timelines" / name
    if not path.is_file():
        pytest.skip(f"{path} is not here")
    with path.open() as file:
        return [row for row in csv.DictReader(file) if row["running"]]


@pytest.mark.parametrize("name", ["a-1000req-qwen3-32b-tp8-len32768.csv", "c-30req-qwen3-32b-tp4-yarn131072.csv"])
def test_no_window_in_the_first_minutes_of_a_real_run(name: str) -> None:
    table = rows(name)
    for row in table[2:60]:
        seen = replay(table, until_s=float(row["t_s"]))
        assert View(seen).window(SPEC, "fresh") is None
        assert SteadyWindow(SPEC)(seen) in (None, "not_settled", "saturated")
        assert seen.t_s < SPEC.settle_limit_s or SteadyWindow(SPEC)(seen) is not None


def test_a_real_run_that_may_go_on_is_saturated_once_its_cache_is_full() -> None:
    spec = dataclasses.replace(SPEC, settle_limit_s=450.0)
    cut = ended_by(SteadyWindow(spec), replay(rows("a-1000req-qwen3-32b-tp8-len32768.csv")))
    assert cut.end == "stopped:saturated"
    assert cut.t_s >= 450


def test_a_stationary_start_with_a_queue_opens_when_all_that_can_run_do() -> None:
    lengths = lognormal(3000, 400, 0.5)
    load = closed_loop(Server(max_num_seqs=8, noise=0.05), lengths, n=32, until_s=90, ages=[100] * 8 + [0] * 24)
    view = View(load, slots=8)
    assert view.burst_over_s is not None
    assert view.burst_over_s < 3
    cut = ended_by(SteadyWindow(SPEC, start="stationary", slots=8), load)
    assert cut.end == "stopped:steady"
    assert cut.t_s < 35


def test_a_long_burst_is_waited_for_as_long_as_prompts_pour_in() -> None:
    lengths, ages = lognormal(600, 2000, 0.8), lognormal(32, 900, 0.8, seed=4)
    whole = [a + b for a, b in zip(lengths, [*ages, *[0] * 600], strict=False)]
    load = closed_loop(Server(noise=0.05), whole, n=32, until_s=160, ages=ages)

    def burst(until_s: float, pours: bool) -> Observation:
        changed = []
        for s in load.samples:
            early = s.t_s < until_s
            prompts = int(5_000 * min(s.t_s, until_s)) if pours else int(5_000 * min(s.t_s, 20.0))
            generated = (s.generation_tokens or 0) // 10 if early else s.generation_tokens
            state = {"waiting": 20, "running": 12} if early else {}
            changed.append(dataclasses.replace(s, prompt_tokens=prompts, generation_tokens=generated, **state))
        return with_samples(load, changed)

    whole_burst = 5_000 * 90
    pours = burst(90, True)
    assert View(pours, burst_tokens=whole_burst).burst_over_s == pytest.approx(90, abs=6)
    assert View(so_far(pours, 80), burst_tokens=whole_burst).burst_over_s is None
    assert View(pours).burst_over_s == pytest.approx(60, abs=2)  # nobody said how long it is
    assert View(burst(90, False), burst_tokens=whole_burst).burst_over_s == pytest.approx(60, abs=2)
    silent = with_samples(load, [dataclasses.replace(s, prompt_tokens=None, running=12) for s in load.samples])
    assert View(silent, burst_tokens=whole_burst).burst_over_s == pytest.approx(60, abs=2)
