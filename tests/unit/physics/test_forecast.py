import dataclasses
import math
import random
import statistics

import pytest

from autotune.physics.concurrency import best_concurrency
from autotune.physics.fluid import fluid_run, loop_shape
from autotune.physics.forecast import (
    RunPlan,
    best_of,
    copied,
    forecast_run,
    simulate_copy,
    simulate_run,
    spread_of,
    student_quantile,
)
from autotune.physics.laws import law_of, lognormal_law
from autotune.physics.lengths import KnownLength, observed_lengths
from autotune.physics.simulator import EngineLimits
from autotune.physics.steptime import StepModel
from autotune.records.lengths import AnswerLength, Lengths

MODEL = StepModel(t0_s=0.0127, sequence_s=2.4e-5, kv_token_s=3.3e-8, prefill_token_s=5e-5, noise=0.0)
LAW = lognormal_law(mean=3000, sigma=0.7, max_tokens=8192)
PROMPTS = law_of([(200, 1), (300, 1), (400, 1)], "prompts")
KNOWN = KnownLength(uncut=lognormal_law(mean=3000, sigma=0.7, max_tokens=None), max_tokens=8192)


def plan(**changes: object) -> RunPlan:
    base = RunPlan(
        requests=400, concurrency=100, limits=EngineLimits(kv_tokens=500_000), prompts=PROMPTS, answers=KNOWN
    )
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def test_a_forecast_tells_the_makespan_and_where_it_comes_from() -> None:
    found = forecast_run(MODEL, plan(), startup_s=90.0, limits=("made up",))
    forecast = found.forecast
    exact = simulate_run(plan(), MODEL, LAW, hit_share=0.3)
    assert forecast.makespan_s == pytest.approx(exact.makespan_s, rel=0.05)
    assert forecast.low_s < forecast.makespan_s < forecast.high_s
    assert (forecast.level, forecast.startup_s, forecast.requests) == (0.95, 90.0, 400)
    assert forecast.truncated_share == pytest.approx(LAW.cut_share)
    assert 0 < (forecast.tail_share or 0) < 1
    assert forecast.limits[0] == "made up"
    assert "step constants not measured here" in forecast.limits[1]
    rates = [
        (b.generated_tokens - a.generated_tokens) / (b.t_s - a.t_s)
        for a, b in zip(found.samples, found.samples[1:], strict=False)
    ]
    assert min(rates) <= forecast.output_tokens_per_s <= max(rates)
    assert (found.preemptions, found.kv_full_s) == (0, None)
    assert 0.3 < found.kv_peak < 1.0


def test_nothing_unknown_leaves_a_narrow_interval_and_doubt_widens_it() -> None:
    exact = forecast_run(dataclasses.replace(MODEL, guesses=()), plan(), draws=12).forecast
    doubtful = forecast_run(MODEL.with_sd(t0_s=0.15, kv_token_s=0.3), plan(), draws=12).forecast
    scaled = forecast_run(MODEL, plan(answers=dataclasses.replace(KNOWN, scale_sd=0.2)), draws=12).forecast
    narrow = (exact.high_s - exact.low_s) / exact.makespan_s
    assert narrow < 0.25
    for wide in (doubtful, scaled):
        assert (wide.high_s - wide.low_s) / wide.makespan_s > 1.3 * narrow
    assert exact.limits == ()


def test_the_same_seed_gives_the_same_forecast() -> None:
    assert forecast_run(MODEL, plan(), draws=4) == forecast_run(MODEL, plan(), draws=4)


def test_a_full_cache_shows_in_the_series() -> None:
    found = forecast_run(MODEL, plan(limits=EngineLimits(kv_tokens=120_000)), draws=6)
    assert found.preemptions > 10
    assert found.kv_peak > 0.97
    assert found.kv_full_s is not None
    assert found.kv_full_s < found.forecast.makespan_s


def test_several_engines() -> None:
    one = forecast_run(MODEL, plan(), draws=4).forecast
    four = forecast_run(MODEL, plan(engines=4), draws=4).forecast
    assert one.makespan_s / 4 < four.makespan_s < one.makespan_s


def test_a_request_that_cannot_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="6000 KV tokens cannot hold a request of 8592"):
        forecast_run(MODEL, plan(limits=EngineLimits(kv_tokens=6000)))


def test_a_prior_in_the_lengths_is_named() -> None:
    rng = random.Random(1)
    answers = tuple(AnswerLength(tokens=min(t, 4000), ended=t < 4000) for t in LAW.sample(64, rng))
    seen = observed_lengths(
        Lengths(prompt_tokens=(), answers=answers, max_tokens=4000, source="probe"), 8192, prior=True
    )
    forecast = forecast_run(MODEL, plan(answers=seen), draws=8).forecast
    assert forecast.length_source == "observed+prior"
    assert "part of the length law is a prior, not observed" in forecast.limits


def test_a_copy_is_as_fast_as_its_original() -> None:
    for changes in ({}, {"limits": EngineLimits(kv_tokens=180_000)}, {"concurrency": 400}):
        original = simulate_run(plan(**changes), MODEL, LAW, hit_share=0.3)
        small = simulate_copy(plan(**changes), MODEL, LAW, 0.3)
        assert len(small.finished) < 400
        assert small.makespan_s == pytest.approx(original.makespan_s, rel=0.06)


def test_a_long_run_is_shortened_in_its_copies() -> None:
    small = simulate_copy(plan(requests=5000, concurrency=16), MODEL, LAW, 0.3)
    assert len(small.finished) <= 320


def test_copied_steps_take_as_long() -> None:
    model = dataclasses.replace(MODEL, beyond_s=1e-4, graph_limit=64, expert_s=5e-3, expert_share=0.1, compute_s=1e-5)
    small = copied(model, 4.0)
    for batch, kv, prompts in ((8, 4000, 0), (200, 300_000, 512)):
        assert small.step_s(batch / 4, kv / 4, prompts / 4) == pytest.approx(model.step_s(batch, kv, prompts))


def test_student_quantiles() -> None:
    for freedom, exact in ((5, 2.5706), (10, 2.2281), (31, 2.0395), (1000, 1.9623)):
        assert student_quantile(freedom) == pytest.approx(exact, rel=0.002)


def test_spreads_add_in_squares() -> None:
    assert spread_of([0.1, 0.3], 0.1) == pytest.approx((0.2, math.hypot(0.1 * math.sqrt(2), 0.1)))
    assert spread_of([], 0.3) == (0.0, 0.3)


def test_best_of_finds_the_bottom_of_a_bowl_and_prefers_small_when_flat() -> None:
    asked: list[int] = []

    def bowl(n: int) -> float:
        asked.append(n)
        return (math.log(n) - math.log(150)) ** 2 + 1

    assert best_of(bowl, 1, 1000) == pytest.approx(150, rel=0.1)
    assert len(asked) < 30
    assert 60 <= best_of(lambda n: 1.0 if n >= 60 else 2.0, 1, 1000) <= 64
    assert best_of(lambda n: 1.0, 3, 3) == 3


@pytest.mark.parametrize("concurrency", [16, 60, 200])
@pytest.mark.parametrize("requests", [150, 1200])
def test_the_fluid_agrees_with_the_simulator_without_preemption(requests: int, concurrency: int) -> None:
    limits = EngineLimits(kv_tokens=2_000_000)
    runs = [
        simulate_run(
            plan(requests=requests, concurrency=concurrency, limits=limits), MODEL, LAW, hit_share=0, seed=seed
        ).makespan_s
        for seed in range(1, 5)
    ]
    fluid = fluid_run(MODEL, limits, loop_shape(LAW), prompt_tokens=300, requests=requests, concurrency=concurrency)
    assert fluid.makespan_s == pytest.approx(statistics.fmean(runs), rel=0.06)
    assert fluid.kv_usage == pytest.approx(min(concurrency, requests) * (300 + LAW.age_mean + 8) / 2_000_000, rel=0.02)
    if requests > 4 * concurrency:
        assert fluid.kv_peak >= fluid.kv_usage
    assert 0 < fluid.tail_s < fluid.makespan_s


def test_the_fluid_is_near_the_simulator_with_preemption() -> None:
    limits = EngineLimits(kv_tokens=130_000, hit_share=0.3)
    run = simulate_run(plan(concurrency=120, requests=600, limits=limits), MODEL, LAW, hit_share=0.3)
    fluid = fluid_run(MODEL, limits, loop_shape(LAW), prompt_tokens=300, requests=600, concurrency=120)
    assert run.end.preemptions > 100
    assert fluid.kv_usage > 1
    assert fluid.makespan_s == pytest.approx(run.makespan_s, rel=0.15)


def test_the_sequence_limit_caps_the_fluid() -> None:
    limits = EngineLimits(kv_tokens=2_000_000, max_num_seqs=50)
    a, b = (
        fluid_run(MODEL, limits, loop_shape(LAW), prompt_tokens=300, requests=600, concurrency=c) for c in (50, 400)
    )
    assert a == b


def test_best_concurrency_stops_where_the_cache_ends() -> None:
    limits = EngineLimits(kv_tokens=269_312)
    model = StepModel(t0_s=0.0194, sequence_s=2.3e-5, kv_token_s=6.5e-8, prefill_token_s=1e-4)
    law = lognormal_law(mean=4000, sigma=0.8, max_tokens=14_000)
    best, run = best_concurrency(model, limits, law, prompt_tokens=300, requests=4000, kv_limit=0.95)
    # Measured on an H200 with this load: 64 of 32, 64, 96, 128, 192.
    assert 48 <= best <= 80
    assert run.kv_peak <= 0.96
    capped, _ = best_concurrency(model, limits, law, prompt_tokens=300, requests=4000, largest=20)
    assert capped == 20
    two, _ = best_concurrency(model, limits, law, prompt_tokens=300, requests=4000, kv_limit=0.95, engines=2)
    assert two == pytest.approx(2 * best, rel=0.15)


def test_best_concurrency_of_a_few_requests_is_all_of_them() -> None:
    best, _ = best_concurrency(MODEL, EngineLimits(kv_tokens=2_000_000), LAW, prompt_tokens=300, requests=3)
    assert best == 3
