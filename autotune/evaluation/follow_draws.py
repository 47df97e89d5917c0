"""Draws of what is not known of the answers of a run under way: their law, the mean prompt, who has ended."""

from __future__ import annotations

import dataclasses
import functools
import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.evaluation.follow_law import (
    LawTable,
    end_likelihood,
    table_of,
    table_of_family,
)
from autotune.evaluation.follow_loop import USUAL_PROMPT, LoopFit, loop_likelihood
from autotune.evaluation.follow_replay import Chance, Exposure, Flight, replay, with_prompts
from autotune.physics.lengths import AnswerLengths
from autotune.physics.lengths_prior import LawFamily, broad_family, posterior_family, tempered

Array = npt.NDArray[np.float64]

PASSES = 2
"""The first replay knows no law; the second uses what the first has taught."""


@dataclass(frozen=True)
class LawDraws:
    """Equally likely readings of the run: for each the law (a row of the table) and the flight with its ends."""

    table: LawTable
    chosen: tuple[int, ...]
    flights: tuple[Flight, ...]

    def chance(self, number: int) -> Chance:
        """Chance to end, by the law of a draw."""
        return functools.partial(self.table.chance, self.chosen[number])

    @property
    def prompt_tokens(self) -> float:
        """Mean prompt, middle of the draws."""
        known = [f.prompt_tokens for f in self.flights if f.prompt_tokens is not None]
        return float(np.median(known)) if known else USUAL_PROMPT


def draw_laws(
    flight: Flight,
    capacity: float | None,
    max_tokens: int,
    lengths: AnswerLengths | None,
    count: int,
    rng: np.random.Generator,
) -> LawDraws:
    """Draws from the posterior given the ends seen, or, in a closed loop, given prompts and KV tokens.

    Args:
        capacity: KV tokens of all engines; ``None``: not known.
        lengths: of the answers, where they are given: then nothing is inferred of them.
    """
    if lengths is not None:
        draws = random.Random(0)
        table = table_of([lengths.draw(draws).extended() for _ in range(count)], max_tokens)
    else:
        family = _posterior(flight, capacity, max_tokens, rng)
        spread = np.linspace(0, len(family.points) - 1, count).round().astype(np.intp)
        table = table_of_family(family.take(rng.permutation(len(family.points))[spread]), max_tokens)
    prompts = loop_likelihood(table, flight, capacity).prompt_tokens
    flights = tuple(_prompted(flight, float(p)) for p in prompts)
    return LawDraws(table, tuple(range(count)), flights)


def _posterior(flight: Flight, capacity: float | None, max_tokens: int, rng: np.random.Generator) -> LawFamily:
    """Laws of the answers: the plateau as a renewal process, what comes after it end by end.

    Beside a full cache the ages of those that run are what matters: there ends count one by one, if seen.
    """
    saturated = bool(flight.full[: flight.plateau].mean() > 0.5) if flight.plateau else False
    one_by_one = saturated and not np.isnan(flight.ended).any()
    first = 0 if one_by_one else flight.plateau

    def plateau(family: LawFamily) -> LoopFit:
        return loop_likelihood(table_of_family(family, max_tokens), flight, capacity)

    def start(family: LawFamily) -> Array:
        if one_by_one or not flight.plateau:
            return np.zeros(len(family.points))
        return plateau(family).log_likelihood

    family = posterior_family(max_tokens, start) if flight.plateau and not one_by_one else broad_family(max_tokens)
    for _ in range(PASSES if first < len(flight.readings) else 0):
        table = table_of_family(family, max_tokens)
        mean = LawTable(table.cell, table.survival.mean(axis=0)[None, :])
        replayed = _prompted(flight, float(np.median(plateau(family).prompt_tokens)))
        _, exposures, _ = replay(replayed, functools.partial(mean.chance, 0), max_tokens, rng)
        events = sum(e.ended or 0.0 for e in exposures if e.interval >= first)

        def likelihood(tried: LawFamily, seen: list[Exposure] = exposures, events: float = events) -> Array:
            ends = end_likelihood(table_of_family(tried, max_tokens), seen, first)
            return np.asarray(start(tried) + tempered(ends, events))

        family = posterior_family(max_tokens, likelihood)
    return family


def _prompted(flight: Flight, prompt_tokens: float) -> Flight:
    """The flight with a mean prompt, and with the ends that it shows where nothing else shows them."""
    if flight.prompt_tokens is not None or not prompt_tokens > 0:
        return flight
    if np.isnan(flight.ended).all() and all(r.prompt_tokens is not None for r in flight.readings):
        return with_prompts(flight, prompt_tokens)
    return dataclasses.replace(flight, prompt_tokens=prompt_tokens)
