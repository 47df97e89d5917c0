"""What an answer's length may be beyond what was seen: a broad family of laws, weighed by what was seen.

The family: answers of one kind (lognormal, or Weibull with its lighter tail) with a smaller group of short ones
(lognormal) and perhaps a few that never end by themselves (they run to the limit). Its parameters are drawn from broad priors relative to the
output limit; each member is weighed by how well it explains the answers that ended at each age. Used past
the last observed token only, and said to be a prior wherever it is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

MEMBERS = 4000
MEDIAN_SHARE, MEDIAN_SD = 0.4, 1.1
"""Median of the main group over the output limit: lognormal."""
SIGMA, SIGMA_SD = 0.65, 0.45
"""Shape of the main group (published answer lengths: 0.5-1.1): lognormal."""
SHORT_RATIO, SHORT_SD = 0.3, 0.8
"""Median of the short group over that of the main one: lognormal."""
SHORT_BETA = (1.0, 3.0)
"""Share of the short group: beta."""
WEIBULL_SHAPE, WEIBULL_SD = 1.4, 0.4
"""Shape of the main group where it is Weibull (half of the members): lognormal."""
ENDLESS_NEVER, ENDLESS_BETA = 0.5, (0.7, 7.0)
"""Chance that all answers end by themselves; else the share that never does: beta (greedy decoding repeats)."""
TRUST = 150.0
"""So many ended answers weigh in at most: the family is not the truth, more data must not make it certain."""


def normal_cdf(z: Array) -> Array:
    """Standard normal distribution, within 2e-4 (logistic approximation of Bowling et al., 2009)."""
    cut = np.clip(z, -6.0, 6.0)
    return np.asarray(1.0 / (1.0 + np.exp(-1.5976 * cut - 0.07056 * cut**3)))


@dataclass(frozen=True)
class LawFamily:
    """Members of the family; each attribute is an array with one value a member."""

    median: Array
    sigma: Array
    shape: Array
    """Weibull shape of the main group; 0: it is lognormal."""
    short_median: Array
    short_sigma: Array
    short_share: Array
    endless_share: Array

    def survival(self, tokens: Array) -> Array:
        """Share of answers longer than ``tokens``: an array (members, tokens)."""
        logs = np.log(np.maximum(tokens, 1e-9))[None, :]
        from_median = logs - np.log(self.median)[:, None]
        main = normal_cdf(-from_median / self.sigma[:, None])
        weibull = self.shape > 0
        power = np.clip(self.shape[weibull, None] * from_median[weibull], -50.0, 6.0)
        main[weibull] = np.exp(-np.log(2.0) * np.exp(power))
        short = normal_cdf((np.log(self.short_median)[:, None] - logs) / self.short_sigma[:, None])
        mixed = main + self.short_share[:, None] * (short - main)
        return np.asarray(mixed + self.endless_share[:, None] * (1.0 - mixed))

    def take(self, index: npt.NDArray[np.intp]) -> LawFamily:
        """Some of the members."""
        return LawFamily(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


def broad_family(max_tokens: int, *, members: int = MEMBERS, seed: int = 0) -> LawFamily:
    """Members drawn from the priors; the same for the same arguments."""
    rng = np.random.default_rng(seed)
    median = max_tokens * MEDIAN_SHARE * np.exp(MEDIAN_SD * rng.standard_normal(members))
    shape = np.clip(WEIBULL_SHAPE * np.exp(WEIBULL_SD * rng.standard_normal(members)), 0.5, 6.0)
    endless = rng.beta(*ENDLESS_BETA, members)
    return LawFamily(
        median=median,
        sigma=np.clip(SIGMA * np.exp(SIGMA_SD * rng.standard_normal(members)), 0.15, 2.0),
        shape=np.where(rng.random(members) < 0.5, shape, 0.0),
        short_median=median * SHORT_RATIO * np.exp(SHORT_SD * rng.standard_normal(members)),
        short_sigma=np.clip(SIGMA * np.exp(SIGMA_SD * rng.standard_normal(members)), 0.15, 2.0),
        short_share=rng.beta(*SHORT_BETA, members),
        endless_share=np.where(rng.random(members) < ENDLESS_NEVER, 0.0, endless),
    )


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


def weigh(log_likelihoods: Array, events: float) -> Array:
    """Normalised weights; more than ``TRUST`` events count as ``TRUST``."""
    tempered = log_likelihoods * min(1.0, TRUST / max(events, 1.0))
    weights = np.exp(tempered - tempered.max())
    return np.asarray(weights / weights.sum())


def resample(weights: Array, count: int, rng: np.random.Generator) -> npt.NDArray[np.intp]:
    """Indices of members in proportion to their weights (systematic: little noise of its own)."""
    levels = (np.arange(count) + rng.random()) / count
    found = np.searchsorted(np.cumsum(weights), levels)
    return np.asarray(np.minimum(found, len(weights) - 1), dtype=np.intp)
