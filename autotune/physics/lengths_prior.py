"""What an answer's length may be beyond what was seen: a broad family of laws, weighed by what was seen.

The family: answers of one kind (lognormal, or Weibull with its lighter tail) with a smaller group of short ones
(lognormal) and perhaps a few that never end by themselves (they run to the limit). Each member is a point with
standard normal coordinates, relative to the output limit; a posterior is reached from the prior in steps, by
weighing, resampling and moving (sequential Monte Carlo with preconditioned Crank-Nicolson moves, which leave
the normal prior as it is: Cotter et al., 2013). Used past the last observed token only, and said to be a
prior wherever it is used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Likelihood = Callable[["LawFamily"], Array]
"""Log-likelihood of each member."""

MEMBERS = 320
MEDIAN_SHARE, MEDIAN_SD = 0.4, 1.1
"""Median of the main group over the output limit: lognormal."""
SIGMA, SIGMA_SD = 0.85, 0.22
"""Shape of a lognormal group: lognormal (long answers of reasoning models: p90 about 3 x the median, 0.86)."""
WEIBULL_SHAPE, WEIBULL_SD = 1.15, 0.2
"""Shape of the main group where it is Weibull (half of the members): lognormal."""
SHORT_RATIO, SHORT_SD = 0.25, 0.7
"""Median of the short group over that of the main one: lognormal."""
SHORT_SHARE, SHORT_SHARE_SD = 0.12, 1.0
"""Share of the short group: logistic normal."""
ENDLESS_SHARE, ENDLESS_SD = 0.03, 1.5
"""Share of answers that never end by themselves, in the half of the members that has any: logistic normal
(greedy decoding repeats itself)."""
COORDINATES = 9
TRUST = 150.0
"""So many ended answers weigh in at most: the family is not the truth, more data must not make it certain."""
KEPT = 0.4
"""Effective share of the members that each step of the way to the posterior keeps."""
MOVES, MOVE, ACCEPTED = 3, 0.45, 0.3
"""Moves after each step; their first length; the share that should be accepted (the length follows it)."""


def normal_cdf(z: Array) -> Array:
    """Standard normal distribution, within 2e-4 (logistic approximation of Bowling et al., 2009)."""
    cut = np.clip(z, -6.0, 6.0)
    return np.asarray(1.0 / (1.0 + np.exp(-cut * (1.5976 + 0.07056 * cut * cut))))


@dataclass(frozen=True)
class LawFamily:
    """Members of the family: standard normal coordinates (members, COORDINATES) and the limit they refer to."""

    points: Array
    max_tokens: int

    def survival(self, tokens: Array) -> Array:
        """Share of answers longer than ``tokens``: an array (members, tokens)."""
        z = self.points.T[:, :, None]
        logs = np.log(np.maximum(tokens, 1e-9))[None, :]
        median = np.log(self.max_tokens * MEDIAN_SHARE) + MEDIAN_SD * z[0]
        sigma = np.clip(SIGMA * np.exp(SIGMA_SD * z[1]), 0.12, 2.0)
        main = normal_cdf((median - logs) / sigma)
        weibull = self.points[:, 3] > 0
        shape = np.clip(WEIBULL_SHAPE * np.exp(WEIBULL_SD * z[2]), 0.5, 6.0)[weibull]
        power = np.clip(shape * (logs - median[weibull]), -50.0, 6.0)
        main[weibull] = np.exp(-np.log(2.0) * np.exp(power))
        short_sigma = np.clip(SIGMA * np.exp(SIGMA_SD * z[5]), 0.12, 2.0)
        short = normal_cdf((median + np.log(SHORT_RATIO) + SHORT_SD * z[4] - logs) / short_sigma)
        mixed = main + _share(SHORT_SHARE, SHORT_SHARE_SD, z[6]) * (short - main)
        endless = np.where(z[8] > 0, _share(ENDLESS_SHARE, ENDLESS_SD, z[7]), 0.0)
        return np.asarray(mixed + endless * (1.0 - mixed))

    def take(self, index: npt.NDArray[np.intp]) -> LawFamily:
        """Some of the members."""
        return LawFamily(self.points[index], self.max_tokens)


def broad_family(max_tokens: int, *, members: int = MEMBERS, seed: int = 0) -> LawFamily:
    """Members drawn from the prior; the same for the same arguments."""
    return LawFamily(np.random.default_rng(seed).standard_normal((members, COORDINATES)), max_tokens)


def posterior_family(max_tokens: int, likelihood: Likelihood, *, members: int = MEMBERS, seed: int = 0) -> LawFamily:
    """Members drawn from the posterior, equally likely.

    Args:
        likelihood: log-likelihood of members; what it should not be trusted for is tempered by the caller.
    """
    rng = np.random.default_rng(seed)
    family = broad_family(max_tokens, members=members, seed=seed)
    values = likelihood(family)
    power, length = 0.0, MOVE
    while power < 1.0:
        step = _step(values, 1.0 - power)
        power += step
        weights = np.exp(step * (values - values.max()))
        chosen = resample(weights / weights.sum(), members, rng)
        family, values = family.take(chosen), values[chosen]
        for _ in range(MOVES):
            fresh = rng.standard_normal(family.points.shape)
            tried = LawFamily(np.sqrt(1 - length**2) * family.points + length * fresh, max_tokens)
            new = likelihood(tried)
            accepted = np.log(np.maximum(rng.random(members), 1e-300)) < power * (new - values)
            family = LawFamily(np.where(accepted[:, None], tried.points, family.points), max_tokens)
            values = np.where(accepted, new, values)
            length = float(np.clip(length * np.exp(accepted.mean() - ACCEPTED), 0.05, 0.9))
    return family


def _step(values: Array, rest: float) -> float:
    """How far towards the posterior the members carry at once."""

    def effective(step: float) -> float:
        weights = np.exp(step * (values - values.max()))
        return float(weights.sum() ** 2 / (weights**2).sum() / len(values))

    if effective(rest) >= KEPT:
        return rest
    low, high = 0.0, rest
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (middle, high) if effective(middle) >= KEPT else (low, middle)
    return max(high, rest * 1e-3)


def age_edges(longest: float, *, shortest: float = 16.0, per_octave: int = 3) -> Array:
    """Edges of age bins, tokens: 0, then evenly spaced in the logarithm up to ``longest``."""
    count = max(2, int(per_octave * np.log2(max(2.0, longest / shortest))) + 1)
    return np.concatenate([[0.0], np.geomspace(min(shortest, longest / 2), longest, count)])


def log_likelihood(family: LawFamily, edges: Array, at_risk: Array, ended: Array) -> Array:
    """How well each member explains that so many of those at risk ended in each age bin (binomial)."""
    survival = np.maximum(family.survival(edges), 1e-12)
    survival[:, 0] = 1.0
    stay = np.clip(survival[:, 1:] / survival[:, :-1], 1e-9, 1.0 - 1e-9)
    return np.asarray((np.log1p(-stay) * ended + np.log(stay) * np.maximum(0.0, at_risk - ended)).sum(axis=1))


def tempered(log_likelihoods: Array, events: float) -> Array:
    """More than ``TRUST`` ended answers count as ``TRUST``."""
    return log_likelihoods * min(1.0, TRUST / max(events, 1.0))


def resample(weights: Array, count: int, rng: np.random.Generator) -> npt.NDArray[np.intp]:
    """Indices of members in proportion to their weights (systematic: little noise of its own)."""
    levels = (np.arange(count) + rng.random()) / count
    found = np.searchsorted(np.cumsum(weights), levels)
    return np.asarray(np.minimum(found, len(weights) - 1), dtype=np.intp)


def _share(middle: float, sd: float, z: Array) -> Array:
    return np.asarray(1.0 / (1.0 + (1.0 - middle) / middle * np.exp(-sd * z)))
