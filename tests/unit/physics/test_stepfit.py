import dataclasses
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.physics.stepfit import NOISE_FLOOR, NOISE_PRIOR, PrefillBurst, StepWindow, fit, residuals, steady
from autotune.physics.steptime import CONSTANTS, StepModel

PRIOR = StepModel(
    t0_s=0.02, sequence_s=2e-5, kv_token_s=6e-8, prefill_token_s=1e-4, beyond_s=6e-5, graph_limit=256
).with_sd(t0_s=0.2, sequence_s=0.5, kv_token_s=0.25, prefill_token_s=0.25, beyond_s=0.7)


def window(model: StepModel, batch: float, context: float, *, prompts: float = 300.0, error: float = 0.0) -> StepWindow:
    kv = batch * context
    rate = model.rate(batch, kv, prompts) * math.exp(error)
    return StepWindow(batch=batch, kv_tokens=kv, output_tokens_per_s=rate, prompt_tokens_per_s=prompts)


def seen(model: StepModel, rng: random.Random, batches: tuple[int, ...] = (16, 64, 128, 200)) -> list[StepWindow]:
    return [
        window(model, b, rng.uniform(500, 4000), prompts=rng.uniform(0, 800), error=rng.gauss(0, 0.01))
        for b in batches
        for _ in range(2)
    ]


def values(model: StepModel) -> list[float]:
    return [getattr(model, name) for name in CONSTANTS]


def test_intervals_of_a_rate_hold_the_truth() -> None:
    scores = []
    for seed in range(40):
        rng = random.Random(seed)
        truth = PRIOR.draw(rng)
        truth = dataclasses.replace(truth, log_covariance=PRIOR.log_covariance)
        fitted = fit(seen(truth, rng), PRIOR)
        # Beyond what was seen: twice the batch, above the graph limit.
        draws = [math.log(fitted.draw(rng).rate(400, 800_000)) for _ in range(60)]
        error = math.log(truth.rate(400, 800_000)) - statistics.fmean(draws)
        scores.append(abs(error) / statistics.stdev(draws))
    inside = sum(score <= 2 for score in scores)
    assert inside >= 34  # 95 % of 40 less three standard deviations
    assert statistics.median(scores) == pytest.approx(0.67, abs=0.4)


@given(seed=st.integers(0, 1000), prior=st.booleans())
@settings(max_examples=20, deadline=None)
def test_the_order_of_windows_does_not_matter(seed: int, prior: bool) -> None:
    rng = random.Random(seed)
    windows = seen(PRIOR.scaled(t0_s=1.2, kv_token_s=0.8), rng)
    mixed = rng.sample(windows, len(windows))
    one, two = (fit(w, PRIOR if prior else None) for w in (windows, mixed))
    assert values(one) == pytest.approx(values(two), rel=1e-3, abs=1e-9)


def test_a_weight_counts_as_so_many_windows() -> None:
    windows = seen(PRIOR.scaled(t0_s=1.2), random.Random(0))
    heavy = [dataclasses.replace(w, weight=3.0) for w in windows]
    for prior in (PRIOR, None):
        one, two = fit(heavy, prior), fit(windows * 3, prior)
        assert values(one) == pytest.approx(values(two), rel=1e-3, abs=1e-9)
    # A window without weight says nothing.
    spoilt = dataclasses.replace(window(PRIOR, 100, 2000, error=1.0), weight=0.0)
    assert values(fit([*windows, spoilt], PRIOR)) == pytest.approx(values(fit(windows, PRIOR)), rel=1e-3)


@given(factor=st.floats(0.5, 2.0))
@settings(max_examples=20, deadline=None)
def test_slower_machines_have_larger_constants(factor: float) -> None:
    windows = seen(PRIOR, random.Random(3))
    slow = [
        dataclasses.replace(
            w, output_tokens_per_s=w.output_tokens_per_s / factor, prompt_tokens_per_s=w.prompt_tokens_per_s / factor
        )
        for w in windows
    ]
    one, two = fit(windows), fit(slow)
    assert values(two) == pytest.approx([factor * v for v in values(one)], rel=1e-6, abs=1e-12)


def test_the_slope_above_the_graph_limit_is_learnt_there_only() -> None:
    truth = PRIOR.scaled(beyond_s=2.0)
    below = fit([window(truth, b, 2000) for b in (16, 64, 128, 256)], PRIOR)
    above = fit([window(truth, b, 2000) for b in (16, 64, 128, 256, 400, 600, 800)], PRIOR)
    assert below.beyond_s == pytest.approx(PRIOR.beyond_s, rel=1e-3)
    assert "beyond_s" in below.guesses
    assert above.beyond_s == pytest.approx(truth.beyond_s, rel=0.2)
    assert above.relative_sd["beyond_s"] < 0.5 * below.relative_sd["beyond_s"]


def test_the_noise_is_read_and_never_above_what_is_usual() -> None:
    exact = fit([window(PRIOR, b, c) for b in (16, 64, 128, 200) for c in (500, 4000)], PRIOR)
    rng = random.Random(5)
    rough = fit([window(PRIOR, b, c, error=rng.gauss(0, 0.08)) for b in (16, 64, 128, 200) for c in (500, 4000)], PRIOR)
    assert NOISE_FLOOR <= exact.noise < NOISE_PRIOR
    assert rough.noise == NOISE_PRIOR
    # What is left over shows in the constants' own uncertainty.
    assert rough.relative_sd["t0_s"] > 2 * exact.relative_sd["t0_s"]


def test_a_second_fit_goes_on_from_the_first() -> None:
    truth = PRIOR.scaled(t0_s=1.15, kv_token_s=0.85)
    rng = random.Random(7)
    windows = seen(truth, rng)
    first = fit(windows[:4], PRIOR)
    both = fit(windows[4:], first)
    assert both.rows == len(windows)
    assert set(both.guesses) <= set(first.guesses)
    assert all(both.relative_sd[n] <= first.relative_sd[n] * 1.05 for n in CONSTANTS)
    assert statistics.fmean(map(abs, residuals(both, windows))) < 0.02


def test_a_burst_leaves_room_for_those_that_decode() -> None:
    burst = PrefillBurst(prompt_tokens_per_s=1.0, step_tokens=2048, batch=48, kv_tokens=100_000)
    assert burst.predicted(PRIOR) == pytest.approx(2000 / PRIOR.step_s(48, 100_000, 2000))
    assert PrefillBurst(prompt_tokens_per_s=1.0, step_tokens=8, batch=64).predicted(PRIOR) > 0


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({}, True),
        ({"kv_usage": 0.949}, True),
        ({"kv_usage": 0.95}, False),
        ({"waiting": 0.5}, False),
        ({"preemptions": 1.0}, False),
        ({"batch": 0.0}, False),
        ({"output_tokens_per_s": 0.0}, False),
    ],
)
def test_steady_windows(change: dict[str, float], kept: bool) -> None:
    one = dataclasses.replace(window(PRIOR, 64, 1000), **change)
    assert steady([one]) == ([one] if kept else [])
