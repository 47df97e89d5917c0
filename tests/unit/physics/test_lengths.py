import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.physics.laws import lognormal_law
from autotune.physics.lengths import (
    KnownLength,
    ObservedLengths,
    observed_lengths,
    prompt_law,
    wilson_upper,
)
from autotune.physics.lengths_prior import broad_family, normal_cdf, posterior_family
from autotune.records.lengths import AnswerLength, Lengths


def lengths(pairs: list[tuple[int, bool]], max_tokens: int = 1000, prompts: tuple[int, ...] = ()) -> Lengths:
    answers = tuple(AnswerLength(tokens=t, ended=e) for t, e in pairs)
    return Lengths(prompt_tokens=prompts, answers=answers, max_tokens=max_tokens, source="test")


def censored(law_mean: float, limit: int, count: int, seed: int) -> tuple[Lengths, float]:
    """Answers of a lognormal law, some still running at a random age; and the true mean."""
    rng = random.Random(seed)
    law = lognormal_law(mean=law_mean, sigma=0.8, max_tokens=limit)
    pairs = []
    for tokens in law.sample(count, rng):
        age = int(rng.uniform(1, 2 * limit))
        pairs.append((min(tokens, age), tokens <= age and tokens < limit))
    return lengths(pairs, limit), law.mean


def test_complete_answers_give_their_own_law() -> None:
    found = observed_lengths(lengths([(100, True), (300, True), (200, True), (200, True)]), 1000)
    assert found.law.tokens == (100.0, 200.0, 300.0)
    assert found.law.weights == pytest.approx((0.25, 0.5, 0.25))
    assert (found.law.source, found.law.cut_share, found.tails) == ("observed", 0.0, ())


def test_cut_answers_are_not_dropped() -> None:
    found = observed_lengths(lengths([(100, True), (1000, False), (1000, False), (500, True)]), 1000)
    assert found.law.cut_share == pytest.approx(0.5)
    assert found.law.mean == pytest.approx((100 + 500 + 2 * 1000) / 4)


def test_running_answers_are_censored_not_ended() -> None:
    # Kaplan-Meier by hand: 1/4 end at 100; one of the other three is lost at 150; then 1/2 end at 300.
    found = observed_lengths(lengths([(100, True), (150, False), (300, True), (1000, False)]), 1000)
    assert found.law.weights == pytest.approx((0.25, 0.375, 0.375))


def test_ends_count_before_censoring_at_the_same_age() -> None:
    found = observed_lengths(lengths([(100, False), (100, True), (1000, False)]), 1000)
    assert found.law.weights == pytest.approx((1 / 3, 2 / 3))


def test_a_shorter_limit_cuts_more() -> None:
    found = observed_lengths(lengths([(100, True), (400, True), (800, True), (900, True)]), 500)
    assert found.law.cut_share == pytest.approx(0.5)
    assert found.law.tokens[-1] == 500


def test_nothing_is_claimed_past_the_last_observed_token_unasked() -> None:
    seen = lengths([(100, True)] * 10 + [(600, False)] * 10, 600)
    with pytest.raises(ValueError, match="50% of the answers are longer than the 600 tokens"):
        observed_lengths(seen, 16_384)


def test_all_ended_needs_no_prior_under_a_longer_limit() -> None:
    assert observed_lengths(lengths([(100, True), (600, True)], 600), 16_384).law.source == "observed"


def test_the_prior_says_that_it_is_one_and_widens() -> None:
    rng = random.Random(5)
    law = lognormal_law(mean=8000, sigma=0.8, max_tokens=16_384)
    pairs = [(min(t, 4000), t < 4000) for t in law.sample(128, rng)]
    found = observed_lengths(lengths(pairs, 4000), 16_384, prior=True)
    assert found.law.source == "observed+prior"
    low, high = found.mean_interval()
    assert low < law.mean < high
    assert (high - low) / 2 / law.mean > 0.08
    assert found.law.mean == pytest.approx(law.mean, rel=0.3)
    assert found.cut_upper() > found.law.cut_share
    # Below the last observed token it is Kaplan-Meier, whatever the prior.
    assert found.law.survival(2000) == pytest.approx(sum(t > 2000 for t, _ in pairs) / 128)


def test_without_an_answer_there_is_no_law() -> None:
    with pytest.raises(ValueError, match="at least one answer"):
        observed_lengths(lengths([]), 1000)


def test_mean_intervals_of_censored_answers_cover() -> None:
    covered = 0
    for seed in range(40):
        seen, mean = censored(6000, 16_384, 64, seed)
        low, high = observed_lengths(seen, 16_384, prior=True).mean_interval()
        covered += low <= mean <= high
    assert covered >= 34  # 95 % of 40 less three standard deviations


def test_completed_only_would_be_biased_and_kaplan_meier_is_not() -> None:
    errors, naive = [], []
    for seed in range(30):
        seen, mean = censored(6000, 16_384, 128, seed)
        errors.append(observed_lengths(seen, 16_384, prior=True).law.mean / mean - 1)
        naive.append(statistics.fmean(a.tokens for a in seen.answers if a.ended) / mean - 1)
    assert abs(statistics.fmean(errors)) < 0.04
    assert statistics.fmean(naive) < -0.15


def test_draws_are_laws_under_the_limit_and_differ() -> None:
    seen, _ = censored(6000, 16_384, 64, 1)
    found = observed_lengths(seen, 16_384, prior=True)
    rng = random.Random(0)
    means = [found.draw(rng).mean for _ in range(50)]
    assert statistics.stdev(means) / statistics.fmean(means) == pytest.approx(0.08, abs=0.05)
    assert max(found.draw(rng).tokens[-1] for _ in range(10)) <= 16_384


@pytest.mark.parametrize(("cut", "total", "expected"), [(0, 128, 0.0291), (28, 128, 0.2982), (128, 128, 1.0)])
def test_cut_share_has_wilsons_upper_end(cut: int, total: int, expected: float) -> None:
    found = observed_lengths(lengths([(1000, False)] * cut + [(500, True)] * (total - cut)), 1000)
    assert found.cut_upper() == pytest.approx(expected, abs=0.002)


def test_wilson_without_cases() -> None:
    assert wilson_upper(0.2, 0) == 1.0


@given(
    tokens=st.lists(st.tuples(st.integers(1, 1200), st.booleans()), min_size=1, max_size=40),
)
@settings(max_examples=50, deadline=None)
def test_laws_are_laws(tokens: list[tuple[int, bool]]) -> None:
    found = observed_lengths(lengths(tokens, 1200), 1000, prior=True)
    assert sum(found.law.weights) == pytest.approx(1.0)
    assert found.law.tokens[-1] <= 1000
    assert 0 <= found.law.cut_share <= found.cut_upper() + 1e-9
    assert isinstance(found, ObservedLengths)


def test_known_lengths_scale_before_they_are_cut() -> None:
    known = KnownLength(uncut=lognormal_law(mean=8000, sigma=0.5, max_tokens=None), max_tokens=10_000, scale_sd=0.2)
    assert known.law.max_tokens == 10_000
    rng = random.Random(2)
    means = [known.draw(rng).mean for _ in range(100)]
    assert statistics.stdev(means) / known.law.mean > 0.08
    assert max(known.draw(rng).tokens[-1] for _ in range(20)) == 10_000
    exact = KnownLength(uncut=known.uncut, max_tokens=10_000)
    assert exact.draw(rng).mean == pytest.approx(exact.law.mean)


def test_prompts() -> None:
    assert prompt_law(lengths([(1, True)])) is None
    law = prompt_law(lengths([(1, True)], prompts=(10, 30)))
    assert law is not None
    assert law.mean == 20


def test_normal_distribution_is_close() -> None:
    import numpy as np

    z = np.array([-3.0, -1.0, 0.0, 1.959964])
    exact = [0.00135, 0.158655, 0.5, 0.975]
    assert normal_cdf(z).tolist() == pytest.approx(exact, abs=3e-4)


def test_the_family_is_made_of_survival_curves() -> None:
    import numpy as np

    family = broad_family(16_384, members=200)
    survival = family.survival(np.geomspace(1, 16_384, 40))
    assert survival.shape == (200, 40)
    assert (np.diff(survival, axis=1) <= 1e-9).all()
    assert survival.min() >= 0
    assert survival.max() <= 1


def test_the_posterior_goes_where_the_likelihood_points() -> None:
    import numpy as np

    def likelihood(family: object) -> "np.ndarray":
        points = family.points  # type: ignore[attr-defined]
        return -0.5 * ((points[:, 0] - 2.0) / 0.1) ** 2

    points = posterior_family(1000, likelihood, members=300).points
    # Normal prior times normal likelihood: mean 2 / (1 + 0.01), sd 0.0995.
    assert points[:, 0].mean() == pytest.approx(1.98, abs=0.03)
    assert points[:, 0].std() == pytest.approx(0.0995, rel=0.35)
    assert abs(points[:, 1].mean()) < 0.25
    assert points[:, 1].std() == pytest.approx(1.0, rel=0.25)
