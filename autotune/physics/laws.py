"""Laws of token counts: what an answer's (or a prompt's) length may be, always cut at the run's limit."""

from __future__ import annotations

import functools
import itertools
import math
import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from autotune.errors import InputError

PARTS = 400
"""Atoms of a parametric law: each stands for an equal share, at its conditional mean."""
EXTENDED_SHARE, EXTENDED_PARTS = 0.1, 60
"""``extended``: the share of the law that is spread, and into how many atoms."""


@dataclass(frozen=True, kw_only=True)
class LengthLaw:
    """A discrete law: ``weights[i]`` is the probability of ``tokens[i]``."""

    tokens: tuple[float, ...]
    """Ascending, above 0."""
    weights: tuple[float, ...]
    """At least 0, sum 1."""
    source: str
    """Where it comes from, in words: ``observed``, ``observed+prior``, the name of a shipped law."""
    max_tokens: int | None = None
    """Limit at which lengths are cut: the atom there is the share that is cut."""

    def __post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.weights):
            raise ValueError("a length law needs as many weights as tokens, at least one")
        if self.tokens[0] <= 0 or any(a >= b for a, b in itertools.pairwise(self.tokens)):
            raise ValueError("the tokens of a length law must ascend and be above 0")
        if min(self.weights) < 0 or abs(sum(self.weights) - 1.0) > 1e-6:
            raise ValueError(f"the weights of a length law must be at least 0 and sum to 1, got {sum(self.weights)}")
        if self.max_tokens is not None and self.tokens[-1] > self.max_tokens:
            raise ValueError(f"a length of {self.tokens[-1]} is over the limit of {self.max_tokens}")

    def capped(self, max_tokens: int) -> LengthLaw:
        """The law of the same answers when they are cut at ``max_tokens``."""
        if self.max_tokens is not None and max_tokens > self.max_tokens and self.cut_share > 0:
            raise ValueError(f"lengths cut at {self.max_tokens} say nothing about a limit of {max_tokens}")
        kept = [(t, w) for t, w in zip(self.tokens, self.weights, strict=True) if t < max_tokens]
        return law_of([*kept, (max_tokens, 1.0 - sum(w for _, w in kept))], self.source, max_tokens)

    @functools.cached_property
    def mean(self) -> float:
        """Tokens."""
        return sum(t * w for t, w in zip(self.tokens, self.weights, strict=True))

    @functools.cached_property
    def second_moment(self) -> float:
        """Tokens squared."""
        return sum(t * t * w for t, w in zip(self.tokens, self.weights, strict=True))

    @property
    def sd(self) -> float:
        """Tokens."""
        return math.sqrt(max(0.0, self.second_moment - self.mean**2))

    @property
    def age_mean(self) -> float:
        """Tokens written so far, mean over the answers in flight in a steady state: E[L^2] / (2 E[L])."""
        return self.second_moment / (2 * self.mean)

    @property
    def cut_share(self) -> float:
        """Share of answers that reach the limit."""
        return self.weights[-1] if self.max_tokens is not None and self.tokens[-1] >= self.max_tokens else 0.0

    @functools.cached_property
    def _cumulated(self) -> list[float]:
        return list(itertools.accumulate(self.weights))

    @functools.cached_property
    def _biased(self) -> list[float]:
        return list(itertools.accumulate(t * w for t, w in zip(self.tokens, self.weights, strict=True)))

    def survival(self, tokens: float) -> float:
        """Share of answers longer than so many tokens."""
        below = bisect_right(self.tokens, tokens)
        return 1.0 - self._cumulated[below - 1] if below else 1.0

    def quantile(self, share: float) -> float:
        """Length that a share of the answers does not exceed."""
        return self._at(self._cumulated, share)

    def biased_quantile(self, share: float) -> float:
        """Same for the answers in flight in a steady state: an answer is met in proportion to its length."""
        return self._at(self._biased, share * self._biased[-1])

    def sample(self, count: int, rng: random.Random) -> list[int]:
        """Independent lengths."""
        return [self._whole(self.quantile(rng.random())) for _ in range(count)]

    def stratified(self, count: int, rng: random.Random, *, middle: bool = False) -> list[int]:
        """Lengths in random order, one from each of ``count`` equal shares of the law (or its middle)."""
        places = [0.5] * count if middle else [rng.random() for _ in range(count)]
        drawn = [self._whole(self.quantile((i + u) / count)) for i, u in enumerate(places)]
        rng.shuffle(drawn)
        return drawn

    def extended(self) -> LengthLaw:
        """The law with its longest tenth spread as an exponential excess of the same mean.

        The longest of a hundred answers is not the longest of a thousand: a run's end needs the difference.
        What is cut stays cut, nothing is longer than the limit.
        """
        limit = self.max_tokens or math.inf
        free = [(t, w) for t, w in zip(self.tokens, self.weights, strict=True) if t < limit]
        total, at = 0.0, len(free)
        while at > 0 and total < EXTENDED_SHARE:
            at -= 1
            total += free[at][1]
        if at == 0:
            return self
        base = free[at - 1][0]
        excess = sum((t - base) * w for t, w in free[at:]) / total
        # Conditional means of equal shares of an exponential: F(u) = -log(1 - u).
        edges = [i / EXTENDED_PARTS for i in range(EXTENDED_PARTS + 1)]
        mass = [0.0 if u == 1 else (1 - u) * (1 - math.log(1 - u)) for u in edges]
        spread = [
            (min(limit, base + excess * EXTENDED_PARTS * (a - b)), total / EXTENDED_PARTS)
            for a, b in itertools.pairwise(mass)
        ]
        cut = [(t, w) for t, w in zip(self.tokens, self.weights, strict=True) if t >= limit]
        return law_of([*free[:at], *spread, *cut], self.source, self.max_tokens)

    def _at(self, cumulated: Sequence[float], level: float) -> float:
        return self.tokens[min(bisect_left(cumulated, level), len(self.tokens) - 1)]

    @staticmethod
    def _whole(tokens: float) -> int:
        return max(1, round(tokens))


def law_of(pairs: Iterable[tuple[float, float]], source: str, max_tokens: int | None = None) -> LengthLaw:
    """A law from (tokens, weight) pairs in any order; equal tokens are joined, weights scaled to sum 1."""
    joined: dict[float, float] = {}
    for tokens, weight in pairs:
        if weight > 0:
            joined[tokens] = joined.get(tokens, 0.0) + weight
    total = sum(joined.values())
    if total <= 0:
        raise ValueError("a length law needs at least one length with a positive weight")
    tokens_up = sorted(joined)
    return LengthLaw(
        tokens=tuple(float(t) for t in tokens_up),
        weights=tuple(joined[t] / total for t in tokens_up),
        source=source,
        max_tokens=max_tokens,
    )


def lognormal_law(*, mean: float, sigma: float, max_tokens: int | None, source: str | None = None) -> LengthLaw:
    """Lognormal lengths with this mean (before the cut) and this standard deviation of the logarithm."""
    if mean < 1 or sigma < 0:
        raise ValueError(f"a lognormal law needs a mean of at least 1 and a sigma of at least 0, got {mean}, {sigma}")
    name = source or f"lognormal(mean {mean:g}, sigma {sigma:g})"
    pairs: list[tuple[float, float]] = [(mean, 1.0)]
    if sigma > 0:
        normal = NormalDist()
        edges = [-math.inf, *(normal.inv_cdf(i / PARTS) for i in range(1, PARTS)), math.inf]
        # E[L; z in a part] = mean * (Phi(z_high - sigma) - Phi(z_low - sigma)) for a lognormal L.
        shares = [0.0 if z == -math.inf else 1.0 if z == math.inf else normal.cdf(z - sigma) for z in edges]
        pairs = [(max(1.0, mean * PARTS * (b - a)), 1.0 / PARTS) for a, b in itertools.pairwise(shares)]
    law = law_of(pairs, name)
    return law if max_tokens is None else law.capped(max_tokens)


HLE_MEAN, HLE_SIGMA = 14_000.0, 0.75
HLE_PROMPT_MEAN, HLE_PROMPT_SIGMA = 300.0, 0.6
HLE_LAW = "hle-reasoning"
SHIPPED = {HLE_LAW: (HLE_MEAN, HLE_SIGMA)}
"""Answers to Humanity's Last Exam by open reasoning models of 9-49B (published means: 10,173 cut at 32,768 and
12,111 cut at 65,536; Qwen3-32B on hard mathematics 9,298 cut at 16,384, 22 % of them cut): a lognormal whose
mean is about 10,000 when cut at 14,336 (34 % are cut). Prompts of about 300 tokens."""

LAW_SD = 0.15
"""Relative error of all lengths together, of the shipped law: published means of other models differ by a quarter."""


def shipped_law(name: str, max_tokens: int | None) -> tuple[LengthLaw, LengthLaw]:
    """Answers and prompts of a law that comes with the package; ``max_tokens`` None: answers are not cut.

    Raises:
        InputError: there is none of that name.
    """
    if name not in SHIPPED:
        raise InputError(f"there is no shipped length law {name!r}", hint=f"shipped: {', '.join(SHIPPED)}")
    mean, sigma = SHIPPED[name]
    prompts = lognormal_law(mean=HLE_PROMPT_MEAN, sigma=HLE_PROMPT_SIGMA, max_tokens=None, source=name)
    return lognormal_law(mean=mean, sigma=sigma, max_tokens=max_tokens, source=name), prompts
