import math
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import InputError
from autotune.physics.laws import LengthLaw, law_of, lognormal_law, shipped_law

LAW = law_of([(100, 1), (200, 2), (400, 1)], "three")


def test_moments_and_age() -> None:
    assert LAW.mean == pytest.approx(225)
    assert LAW.second_moment == pytest.approx((100**2 + 2 * 200**2 + 400**2) / 4)
    assert LAW.sd == pytest.approx(math.sqrt(LAW.second_moment - 225**2))
    assert LAW.age_mean == pytest.approx(LAW.second_moment / 450)


def test_quantiles_are_steps() -> None:
    assert [LAW.quantile(u) for u in (0.0, 0.25, 0.26, 0.75, 0.76, 1.0)] == [100, 100, 200, 200, 400, 400]
    assert LAW.survival(99) == 1.0
    assert LAW.survival(100) == pytest.approx(0.75)
    assert LAW.survival(400) == pytest.approx(0.0)


def test_answers_in_flight_are_met_in_proportion_to_their_length() -> None:
    met = [LAW.biased_quantile((i + 0.5) / 900) for i in range(900)]
    assert met.count(100) == 100
    assert met.count(200) == 400
    assert met.count(400) == 400


def test_cut_at_a_limit() -> None:
    cut = LAW.capped(200)
    assert (cut.tokens, cut.weights, cut.cut_share) == ((100.0, 200.0), (0.25, 0.75), 0.75)
    assert cut.capped(150).mean == pytest.approx(0.25 * 100 + 0.75 * 150)
    assert LAW.capped(1000).cut_share == 0.0
    assert LAW.cut_share == 0.0


def test_what_was_cut_cannot_be_made_longer() -> None:
    with pytest.raises(ValueError, match="say nothing about a limit of 300"):
        LAW.capped(200).capped(300)


@given(count=st.integers(1, 400), seed=st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_stratified_lengths_follow_the_law_closely(count: int, seed: int) -> None:
    drawn = LAW.stratified(count, random.Random(seed))
    assert len(drawn) == count
    assert abs(drawn.count(200) - count / 2) <= 2  # a stratum across each border
    assert sorted(LAW.stratified(count, random.Random(1), middle=True)) == sorted(
        LAW.stratified(count, random.Random(2), middle=True)
    )


def test_samples_are_independent_and_seeded() -> None:
    a, b = LAW.sample(500, random.Random(1)), LAW.sample(500, random.Random(1))
    assert a == b
    assert statistics.fmean(a) == pytest.approx(225, rel=0.1)


def test_lognormal_keeps_its_mean_and_spread() -> None:
    law = lognormal_law(mean=4000, sigma=0.8, max_tokens=None)
    assert law.mean == pytest.approx(4000)
    assert law.second_moment / law.mean**2 == pytest.approx(math.exp(0.64), rel=0.02)
    assert law.quantile(0.5) == pytest.approx(4000 * math.exp(-0.32), rel=0.02)
    assert lognormal_law(mean=50, sigma=0, max_tokens=None).tokens == (50.0,)


def test_extended_law_reaches_further_at_the_same_mean() -> None:
    law = law_of([(float(t), 1.0) for t in random.Random(0).sample(range(100, 5000), 128)], "observed", 16_384)
    longer = law.extended()
    assert longer.mean == pytest.approx(law.mean, rel=1e-6)
    assert longer.tokens[-1] > law.tokens[-1]
    assert longer.quantile(0.401) == law.quantile(0.401)


def test_extended_law_keeps_what_is_cut() -> None:
    cut = law_of([(float(t), 1.0) for t in range(100, 1100, 10)], "observed", 2000).capped(900)
    assert cut.extended().cut_share >= cut.cut_share
    assert cut.extended().tokens[-1] == 900
    assert law_of([(10, 1)], "x").extended().tokens == (10.0,)


def test_shipped_law() -> None:
    answers, prompts = shipped_law("hle-reasoning", 14_336)
    assert answers.mean == pytest.approx(10_000, rel=0.02)
    assert answers.cut_share == pytest.approx(0.34, abs=0.01)
    assert prompts.mean == pytest.approx(300)
    with pytest.raises(InputError, match="no shipped length law 'x'"):
        shipped_law("x", 100)


@pytest.mark.parametrize(
    ("tokens", "weights", "limit"),
    [
        ((), (), None),
        ((1.0, 1.0), (0.5, 0.5), None),
        ((0.0,), (1.0,), None),
        ((1.0,), (0.5,), None),
        ((9.0,), (1.0,), 5),
    ],
)
def test_impossible_laws_are_refused(tokens: tuple[float, ...], weights: tuple[float, ...], limit: int | None) -> None:
    with pytest.raises(ValueError):
        LengthLaw(tokens=tokens, weights=weights, source="x", max_tokens=limit)


def test_negative_weights_and_empty_laws_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 0"):
        LengthLaw(tokens=(1.0, 2.0), weights=(-0.5, 1.5), source="x")
    with pytest.raises(ValueError, match="positive weight"):
        law_of([(5, 0.0)], "x")
    with pytest.raises(ValueError, match="mean of at least 1"):
        lognormal_law(mean=0.5, sigma=1, max_tokens=None)
