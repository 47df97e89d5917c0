"""Draws of what is not known of the answers of a run under way: their law, the mean prompt, who has ended."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.evaluation.follow_law import (
    LOOP_MEMBERS,
    MEMBERS,
    USUAL_PROMPT,
    LawTable,
    LoopFit,
    end_likelihood,
    loop_likelihood,
    prior_table,
    table_of,
)
from autotune.evaluation.follow_replay import Chance, Flight, replay, with_prompts
from autotune.physics.lengths import AnswerLengths
from autotune.physics.lengths_prior import resample, weigh

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
        law = self.chosen[number]
        return lambda ages, advance: self.table.chance(law, ages, advance)

    @property
    def prompt_tokens(self) -> float:
        """Mean prompt, middle of the draws."""
        known = [f.prompt_tokens for f in self.flights if f.prompt_tokens is not None]
        return float(np.median(known)) if known else USUAL_PROMPT


def draw_laws(
    flight: Flight,
    kv_tokens: Array,
    max_tokens: int,
    lengths: AnswerLengths | None,
    count: int,
    rng: np.random.Generator,
) -> LawDraws:
    """Draws from the posterior given the ends seen, or, in a closed loop, given prompts and KV tokens.

    Args:
        kv_tokens: in use at the end of each interval; NaN: not seen.
        lengths: of the answers, where they are given: then nothing is inferred of them.
    """
    if lengths is not None:
        draws = random.Random(0)
        table = table_of([lengths.draw(draws).extended() for _ in range(count)], max_tokens)
        chosen = np.arange(count)
        loop = loop_likelihood(table, flight, kv_tokens)
    else:
        table = prior_table(max_tokens, LOOP_MEMBERS if flight.plateau else MEMBERS)
        loop = loop_likelihood(table, flight, kv_tokens)
        chosen = resample(_weights(table, loop, flight, max_tokens, rng), count, rng)
    flights = tuple(_prompted(flight, float(loop.prompt_tokens[i])) for i in chosen)
    return LawDraws(table, tuple(map(int, chosen)), flights)


def _weights(table: LawTable, loop: LoopFit, flight: Flight, max_tokens: int, rng: np.random.Generator) -> Array:
    """Weights of the laws: from the plateau as a renewal process, from what comes after it end by end.

    Beside a full cache the ages of those that run are what matters: there ends count one by one, if seen.
    """
    saturated = bool(flight.full[: flight.plateau].mean() > 0.5) if flight.plateau else False
    seen = not np.isnan(flight.ended).any()
    one_by_one = seen and saturated
    first = 0 if one_by_one else flight.plateau
    start = np.zeros(len(table.survival)) if one_by_one else loop.log_likelihood
    start_events = 0.0 if one_by_one else loop.events
    weights = weigh(start, start_events)
    if first >= len(flight.readings):
        return weights
    for _ in range(PASSES):
        best = int(np.argmax(weights))
        replayed = _prompted(flight, float(loop.prompt_tokens[best]))
        mean = LawTable(table.cell, (weights @ table.survival)[None, :])
        _, exposures, _ = replay(replayed, lambda ages, advance, m=mean: m.chance(0, ages, advance), max_tokens, rng)
        more, events = end_likelihood(table, exposures, first)
        weights = weigh(start + more, start_events + events)
    return weights


def _prompted(flight: Flight, prompt_tokens: float) -> Flight:
    """The flight with the ends that a mean prompt shows, where nothing else shows them."""
    unseen = bool(np.isnan(flight.ended).all())
    return with_prompts(flight, prompt_tokens) if unseen and prompt_tokens > 0 else flight
