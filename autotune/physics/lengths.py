"""Answer lengths from observed answers, cut and unfinished ones included (Kaplan-Meier), and how sure they are.

Answers that were cut or still running say only that the length is at least so much. Dropping them makes the
mean a quarter to a third too small; here they are censored. Up to the last observed token nothing is
assumed. Beyond it there is only a stated prior, and only where it is asked for.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from autotune.physics.laws import LengthLaw, law_of
from autotune.records.lengths import AnswerLength, Lengths

LEVEL = 0.95
INTERVAL_DRAWS = 400
TAIL_PARTS, TAILS = 48, 64
"""Atoms of a law beyond the last observed token, and how many such laws are drawn."""


class AnswerLengths(Protocol):
    """What a forecast needs to know of the answers: the best law, and laws that are as likely."""

    @property
    def law(self) -> LengthLaw:
        """The best law, cut at the run's limit."""
        ...

    def draw(self, rng: random.Random) -> LengthLaw:
        """A law that is as likely."""
        ...


@dataclass(frozen=True, kw_only=True)
class KnownLength:
    """A law that is given rather than observed; a scale error stands for what is not known of it."""

    uncut: LengthLaw
    max_tokens: int
    scale_sd: float = 0.0
    """Relative error of all lengths together (log-normal)."""

    @functools.cached_property
    def law(self) -> LengthLaw:
        """The law, cut at the run's limit."""
        return self.uncut.capped(self.max_tokens)

    def draw(self, rng: random.Random) -> LengthLaw:
        """The law with all lengths scaled by a random factor, cut at the run's limit."""
        if not self.scale_sd:
            return self.law
        factor = math.exp(rng.gauss(0.0, self.scale_sd))
        pairs = [(max(1.0, t * factor), w) for t, w in zip(self.uncut.tokens, self.uncut.weights, strict=True)]
        return law_of(pairs, self.uncut.source).capped(self.max_tokens)


@dataclass(frozen=True, kw_only=True)
class ObservedLengths:
    """Answers, and the law they give under an output limit."""

    answers: tuple[AnswerLength, ...]
    """Ascending; of equal tokens those that ended first."""
    max_tokens: int
    law: LengthLaw
    tails: tuple[LengthLaw, ...] = ()
    """Equally likely laws of the answers longer than the last observed token; empty: none is needed."""

    def draw(self, rng: random.Random) -> LengthLaw:
        """A law as likely as any other given the answers: Bayesian bootstrap, one of the tails."""
        weights = [rng.expovariate(1.0) for _ in self.answers]
        tail = rng.choice(self.tails) if self.tails else None
        return _law(self.answers, weights, self.max_tokens, tail, self.law.source)

    def mean_interval(self, level: float = LEVEL, seed: int = 0) -> tuple[float, float]:
        """Interval of the mean length, tokens."""
        rng = random.Random(seed)
        means = sorted(self.draw(rng).mean for _ in range(INTERVAL_DRAWS))
        low = round((1 - level) / 2 * (INTERVAL_DRAWS - 1))
        return means[low], means[-1 - low]

    def cut_upper(self, seed: int = 0) -> float:
        """Upper end of the 95 % interval of the share that is cut (Wilson, 1927).

        The number of answers behind it is that of a complete sample with the same (Greenwood) variance;
        with a prior tail it is also above 97.5 % of the laws drawn.
        """
        known = self.law.survival(self.max_tokens - 1e-9) if not self.tails else self.law.cut_share
        upper = wilson_upper(known, _effective_count(self.answers, self.max_tokens))
        if self.tails:
            rng = random.Random(seed)
            shares = sorted(self.draw(rng).cut_share for _ in range(INTERVAL_DRAWS))
            upper = max(upper, shares[round(0.975 * (INTERVAL_DRAWS - 1))])
        return upper


def observed_lengths(lengths: Lengths, max_tokens: int, *, prior: bool = False) -> ObservedLengths:
    """The law of ``lengths`` when answers are cut at ``max_tokens``.

    Args:
        prior: allow a broad prior beyond the last observed token; the law's source then is ``observed+prior``.

    Raises:
        ValueError: no answer, or answers are longer than any observed one and no prior is allowed.
    """
    if not lengths.answers:
        raise ValueError("a length law needs at least one answer")
    answers = tuple(sorted(lengths.answers, key=lambda a: (a.tokens, not a.ended)))
    last = answers[-1].tokens
    open_share = _masses(answers, [1.0] * len(answers))[1]
    if last >= max_tokens or open_share < 1e-12:
        law = _law(answers, [1.0] * len(answers), max_tokens, None, "observed")
        return ObservedLengths(answers=answers, max_tokens=max_tokens, law=law)
    if not prior:
        raise ValueError(
            f"{open_share:.0%} of the answers are longer than the {last} tokens that were observed;"
            f" the limit is {max_tokens}"
        )
    tails = _tails(answers, last, max_tokens)
    pairs = [(t, w / len(tails)) for tail in tails for t, w in zip(tail.tokens, tail.weights, strict=True)]
    mean_tail = law_of(pairs, "prior", max_tokens)
    law = _law(answers, [1.0] * len(answers), max_tokens, mean_tail, "observed+prior")
    return ObservedLengths(answers=answers, max_tokens=max_tokens, law=law, tails=tails)


def prompt_law(lengths: Lengths) -> LengthLaw | None:
    """The law of the prompts, if any was counted."""
    pairs = [(float(t), 1.0) for t in lengths.prompt_tokens if t > 0]
    return law_of(pairs, lengths.source) if pairs else None


def wilson_upper(share: float, count: float, z: float = 1.96) -> float:
    """Upper end of Wilson's interval of a share seen in ``count`` cases."""
    if count <= 0:
        return 1.0
    centre = share + z * z / (2 * count)
    spread = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return min(1.0, (centre + spread) / (1 + z * z / count))


def _masses(answers: Sequence[AnswerLength], weights: Sequence[float]) -> tuple[list[tuple[float, float]], float]:
    """Kaplan-Meier: probability of each length at which an answer ended, and what is left beyond."""
    at_risk = math.fsum(weights)
    alive, masses = 1.0, []
    for tokens, group in itertools.groupby(zip(answers, weights, strict=True), key=lambda p: p[0].tokens):
        members = list(group)
        ended = sum(w for a, w in members if a.ended)
        if ended > 0:
            share = min(1.0, ended / at_risk)
            masses.append((float(max(1, tokens)), alive * share))
            alive *= 1.0 - share
        at_risk = max(1e-300, at_risk - sum(w for _, w in members))
    return masses, max(0.0, alive)


def _law(
    answers: Sequence[AnswerLength],
    weights: Sequence[float],
    max_tokens: int,
    tail: LengthLaw | None,
    source: str,
) -> LengthLaw:
    masses, left = _masses(answers, weights)
    pairs: list[tuple[float, float]] = [(min(t, float(max_tokens)), w) for t, w in masses]
    if tail is None:
        pairs.append((float(max_tokens), left))
    else:
        pairs += [(t, left * w) for t, w in zip(tail.tokens, tail.weights, strict=True)]
    return law_of(pairs, source, max_tokens)


def _effective_count(answers: Sequence[AnswerLength], max_tokens: int) -> float:
    """Complete answers that would give the survival at the limit with Greenwood's variance."""
    at_risk, alive, greenwood = float(len(answers)), 1.0, 0.0
    for tokens, group in itertools.groupby(answers, key=lambda a: a.tokens):
        members = list(group)
        ended = sum(a.ended for a in members)
        if tokens >= max_tokens:
            break
        if ended and at_risk > ended:
            greenwood += ended / (at_risk * (at_risk - ended))
        alive *= 1.0 - ended / at_risk
        at_risk -= len(members)
    return (1.0 - alive) / (alive * greenwood) if alive * greenwood > 1e-12 else max(1.0, at_risk or len(answers))


def _tails(answers: Sequence[AnswerLength], last: int, max_tokens: int) -> tuple[LengthLaw, ...]:
    """Laws of what is longer than ``last``, drawn from the broad family as weighed by the answers."""
    import numpy as np

    from autotune.physics import lengths_prior as broad

    tokens = np.array([a.tokens for a in answers], dtype=float)
    ended = np.array([a.ended for a in answers], dtype=bool)
    edges = broad.age_edges(float(last))
    deaths = np.histogram(tokens[ended], edges)[0].astype(float)
    # Who is at risk in a bin: everybody who is still there in its middle.
    middle = (edges[1:] + edges[:-1]) / 2
    at_risk = np.maximum(deaths, [(tokens >= m).sum() for m in middle])
    events = float(deaths.sum())
    family = broad.posterior_family(
        max_tokens, lambda f: broad.tempered(broad.log_likelihood(f, edges, at_risk, deaths), events)
    )
    chosen = family.take(np.arange(0, len(family.points), max(1, len(family.points) // TAILS)))
    return tuple(conditional_laws(chosen, float(last), max_tokens))


def conditional_laws(family: Any, age: float, max_tokens: int) -> Iterable[LengthLaw]:
    """For each member of the family the law of the answers longer than ``age``, cut at ``max_tokens``."""
    import numpy as np

    edges = np.geomspace(max(age, 1.0), max_tokens, TAIL_PARTS + 1)
    survival = family.survival(edges)
    survival = survival / np.maximum(survival[:, :1], 1e-12)
    middles = [float(t) for t in np.sqrt(edges[1:] * edges[:-1])]
    for row in survival:
        masses = np.maximum(0.0, row[:-1] - row[1:])
        pairs = [*zip(middles, map(float, masses), strict=True), (float(max_tokens), max(1e-9, float(row[-1])))]
        yield law_of(pairs, "prior", max_tokens)
