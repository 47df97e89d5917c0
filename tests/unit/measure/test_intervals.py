from __future__ import annotations

import dataclasses
import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student

from autotune.measure.intervals import LOAD_SD, START_SD, Reach, given_the_lengths, of_the_lengths, ratio
from autotune.measure.rate import Rate
from autotune.measure.stationary import long_run
from autotune.physics.laws import lognormal_law
from autotune.physics.lengths import KnownLength
from autotune.physics.steptime import StepModel
from tests.unit.measure.long_runs import Server
from tests.unit.search.results import load

MODEL = StepModel(t0_s=0.015, sequence_s=2e-5, kv_token_s=6.6e-8, prefill_token_s=1e-4)
LAW = lognormal_law(mean=4000, sigma=0.8, max_tokens=14_336)
UNSEEN = math.hypot(START_SD, LOAD_SD)


def rate(half: float | None, freedom: int = 9) -> Rate:
    return Rate(per_s=1000.0, half_width=half, freedom=freedom, change=0.0, change_noise=None)


def half(reach: Reach | None) -> float:
    assert reach is not None
    assert reach.low * reach.high == pytest.approx(1.0)
    return math.log(reach.high)


def test_a_silent_window_still_has_what_it_cannot_see() -> None:
    assert half(given_the_lengths(rate(0.0))) == pytest.approx(1.96 * UNSEEN, rel=1e-4)
    assert half(given_the_lengths(rate(0.0), 0.03)) == pytest.approx(1.96 * math.hypot(UNSEEN, 0.03), rel=1e-4)


def test_a_noisy_window_is_as_wide_as_its_batches_say() -> None:
    assert half(given_the_lengths(rate(500.0))) == pytest.approx(0.5, rel=0.01)
    # Few batches with much noise: nearly all of it is an estimate from three degrees of freedom.
    few = half(given_the_lengths(rate(300.0, freedom=3)))
    assert few == pytest.approx(0.3, rel=0.02)
    assert few / (0.3 / student.ppf(0.975, 3)) > 3


def test_without_batches_or_tokens_there_is_no_interval() -> None:
    assert given_the_lengths(rate(None, 0)) is None
    assert given_the_lengths(dataclasses.replace(rate(1.0), per_s=0.0)) is None


@given(st.floats(0.2, 1), st.floats(1, 5), st.floats(0.2, 1), st.floats(1, 5))
@settings(max_examples=50, deadline=None)
def test_two_errors_together_are_wider_than_either(a: float, b: float, c: float, d: float) -> None:
    both = Reach(low=a, high=b).and_also(Reach(low=c, high=d))
    assert both.low <= min(a, c) + 1e-12
    assert both.high >= max(b, d) - 1e-12
    assert both.low >= a * c - 1e-12


def test_known_lengths_have_no_error_and_scaled_ones_do() -> None:
    run = long_run(LAW, 300.0, 64)
    exact = KnownLength(uncut=LAW, max_tokens=14_336)
    assert of_the_lengths(MODEL, run, 1, exact) == Reach(low=1.0, high=1.0)
    uncut = lognormal_law(mean=4000, sigma=0.8, max_tokens=None)
    loose = of_the_lengths(MODEL, run, 1, KnownLength(uncut=uncut, max_tokens=14_336, scale_sd=0.2))
    # Ten per cent more context cost about 4 %, so twenty per cent sd of it 7-8 %.
    assert 0.82 < loose.low < 0.92
    assert 1.08 < loose.high < 1.22


def test_the_error_of_a_probe_covers_what_the_law_itself_gives() -> None:
    """Many probes of one law: the rate by the true law lies inside nine times of ten or more."""
    run = long_run(LAW, 300.0, 64)
    exact = MODEL.closed_rate(64, run.kv_tokens, 300.0, LAW.mean)
    inside, widths = [], []
    for seed in range(60):
        answers = Server(tp=1, mean=4_000, seed=seed).probe(128)
        own = long_run(answers.law, 300.0, 64)
        found = MODEL.closed_rate(64, own.kv_tokens, 300.0, answers.law.mean)
        reach = of_the_lengths(MODEL, own, 1, answers)
        inside.append(found * reach.low <= exact <= found * reach.high)
        widths.append(math.log(reach.high / reach.low) / 2)
    assert statistics.fmean(inside) >= 0.88
    assert 0.03 < statistics.median(widths) < 0.12


def test_a_ratio_has_the_interval_of_the_paired_difference() -> None:
    ours, theirs = load(64, 1200.0), load(32, 1000.0)  # both within 2 %
    found = ratio(ours, theirs)
    assert found is not None
    middle, low, high = found
    assert middle == pytest.approx(1.2)
    assert low == pytest.approx(1.2 * math.exp(-math.sqrt(2) * 0.02), rel=0.001)
    assert high == pytest.approx(1.2 * math.exp(math.sqrt(2) * 0.02), rel=0.001)


def test_a_ratio_covers_the_truth_as_often_as_it_says() -> None:
    rng = random.Random(1)
    covered = 0
    for _ in range(2_000):
        loads = []
        for truth in (1_000.0, 1_100.0):
            seen = truth * math.exp(rng.gauss(0.0, UNSEEN))
            reach = given_the_lengths(rate(0.0))
            assert reach is not None
            loads.append(load(8, seen, paired_low=seen * reach.low, paired_high=seen * reach.high))
        found = ratio(loads[1], loads[0])
        assert found is not None
        assert found[1] is not None
        assert found[2] is not None
        covered += found[1] <= 1.1 <= found[2]
    assert 0.935 < covered / 2_000 < 0.965


def test_there_is_no_ratio_without_two_rates() -> None:
    assert ratio(load(8, None), load(8, 100.0)) is None
    assert ratio(load(8, 100.0), load(8, None)) is None
    assert ratio(load(8, 100.0, paired_low=None), load(8, 50.0)) == (2.0, None, None)
