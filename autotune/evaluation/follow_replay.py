"""Who is in flight, and how far each one is, from running, waiting and tokens alone.

All sequences that run advance by the same number of tokens: what was written in an interval over how many
ran. vLLM admits in order and preempts the newest, so of those in flight the first ones sent are the ones that
run. What is not seen is which of them ended: they are drawn in proportion to the chance that a length law
gives each at its age.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.evaluation.follow_series import Reading

Array = npt.NDArray[np.float64]
Chance = Callable[[Array, float], Array]
"""Chance that answers of these ages end within so many tokens more."""

AT_ONCE = 0.97
"""So large a share of all requests in flight at the peak: all were sent at once."""
FLAT = 0.03
"""The number in flight counts as constant within so much."""
FULL_KV = 0.97
"""KV use from which preemption must be expected."""
ROOM_KV = 0.9
"""KV use up to which there is room for one more."""
PARTS = 48
"""An interval in which more than the output limit over this is written by each is cut into parts."""
DRAINING = 0.95
"""A closed loop that ends with fewer in flight than this share of what it held has nothing left to send."""


@dataclass(frozen=True, kw_only=True)
class Flight:
    """A run's intervals, and how its client sends."""

    readings: tuple[Reading, ...]
    requests: int
    concurrency: int
    """What the client holds in flight; all requests when they were sent at once."""
    at_once: bool
    draining: bool
    """A closed loop that has sent everything."""
    advance: Array
    """Tokens that each running sequence wrote, one an interval."""
    ended: Array
    """Answers that ended, one an interval; NaN: not seen."""
    plateau: int
    """So many of the first intervals are limited from outside (a queue, a client): each end starts another one."""
    prompt_tokens: float | None
    """Mean of a prompt; ``None``: not seen."""

    @property
    def finished(self) -> float | None:
        """Answers that have ended, if that is seen."""
        last = self.readings[-1].in_flight
        if self.at_once:
            return self.requests - last
        if not np.isnan(self.ended).any():
            return float(self.ended.sum())
        return self.requests - last if self.draining else None

    @property
    def full(self) -> npt.NDArray[np.bool_]:
        """Whether the KV cache was full, one an interval: what waits then may have run before."""
        return np.array([(r.kv_highest or 0.0) >= FULL_KV for r in self.readings])


def read_flight(readings: Sequence[Reading], requests: int) -> Flight:
    """How the client sends, how the sequences advance, and what is seen of ends."""
    flight = np.array([r.in_flight for r in readings])
    peak = float(flight.max())
    plateau = int((flight >= peak * (1 - FLAT)).sum())
    falls_at_once = len(flight) > 2 and plateau <= 2 and peak >= 0.85 * requests
    at_once = peak >= AT_ONCE * requests or falls_at_once
    running = np.array([r.running for r in readings])
    before = np.concatenate([[running[0]], running[:-1]])
    written = np.array([r.output_tokens for r in readings])
    advance = written / np.maximum(0.5, (running + before) / 2)
    concurrency = requests if at_once else round(float(np.median(flight[flight >= peak * (1 - 2 * FLAT)])))
    draining = not at_once and _drains(flight, concurrency)
    ended = _ended(readings, flight, requests, at_once)
    if at_once:
        queued = queued_beside_room(readings)
        plateau = queued[-1] + 1 if len(queued) >= 2 else 0
    else:
        plateau = int(np.nonzero(flight >= DRAINING * concurrency)[0][-1]) + 1
    return Flight(
        readings=tuple(readings),
        requests=requests,
        concurrency=concurrency,
        at_once=at_once,
        draining=draining,
        advance=advance,
        ended=ended,
        plateau=plateau,
        prompt_tokens=_mean_prompt(readings, ended, at_once, requests),
    )


def queued_beside_room(readings: Sequence[Reading]) -> list[int]:
    """Readings with a queue although the cache has room and no more run than ever: the sequence limit."""
    most = max(r.running for r in readings)
    return [
        i
        for i, r in enumerate(readings)
        if r.waiting > 0 and (r.kv_highest or 0.0) < ROOM_KV and r.running > 0.97 * most
    ]


def _drains(flight: Array, concurrency: int) -> bool:
    """Fewer and fewer at the end, after the level was once reached."""
    tail = flight[-3:]
    return len(flight) > 2 and bool(
        tail[-1] < DRAINING * concurrency and np.all(np.diff(tail) <= 0) and tail[0] > tail[-1]
    )


def _mean_prompt(readings: Sequence[Reading], ended: Array, at_once: bool, requests: int) -> float | None:
    """Where starts are seen: prompt tokens over the requests that were started."""
    if np.isnan(ended).any() or any(r.prompt_tokens is None for r in readings):
        return None
    # What waits once the cache was full may have started before.
    full = next((i for i, r in enumerate(readings) if (r.kv_highest or 0.0) >= FULL_KV), len(readings))
    last = max(0, full - 1)
    tokens = sum(r.prompt_tokens or 0.0 for r in readings[: last + 1])
    started = requests - readings[last].waiting
    if not at_once:
        started = readings[last].running + float(ended[: last + 1].sum())
    return tokens / started if tokens > 0 and started > 0 else None


def _ended(readings: Sequence[Reading], flight: Array, requests: int, at_once: bool) -> Array:
    if at_once:
        return np.maximum(0.0, -np.diff(flight, prepend=float(requests)))
    if any(r.completions is not None for r in readings):
        return np.array([r.completions or 0.0 for r in readings])
    return np.full(len(readings), np.nan)


def with_prompts(flight: Flight, prompt_tokens: float) -> Flight:
    """A closed loop whose prompts are known: each that was computed replaced an answer that ended.

    Once the cache was full new requests wait behind preempted ones: from then on ends stay unseen.
    """
    readings = flight.readings
    started = np.array([r.prompt_tokens or 0.0 for r in readings]) / prompt_tokens
    growth = np.diff(np.array([r.in_flight for r in readings]), prepend=0.0)
    waits = np.maximum.accumulate(flight.full & np.array([r.waiting > 0 for r in readings]))
    ended = np.where(waits, np.nan, np.maximum(0.0, started - growth))
    return dataclasses.replace(flight, ended=ended, prompt_tokens=prompt_tokens)


@dataclass
class Population:
    """Those in flight, in the order in which they were sent."""

    ages: Array
    """Tokens written so far."""
    running: int
    """So many of the first run, the others wait."""
    sent: int
    """Requests sent so far, ended ones included."""


@dataclass(frozen=True)
class Exposure:
    """A part of an interval: those that ran, by their age, and how many ended."""

    interval: int
    ages: Array
    advance: float
    ended: float | None


def replay(
    flight: Flight, chance: Chance, max_tokens: int, rng: np.random.Generator
) -> tuple[Population, list[Exposure], Array]:
    """Play the run back: the population now, what each part of an interval exposed, and tokens in the cache.

    Intervals are cut into parts so short that no answer ends and another one begins and ends in one of them.
    The third value has one entry an interval: the sum of the ages of those that run at its end.
    """
    ages = np.zeros(flight.requests if flight.at_once else round(flight.readings[0].in_flight))
    sent, owed = len(ages), 0.0
    exposures: list[Exposure] = []
    sums = []
    limit = 0.995 * max_tokens
    before = flight.readings[0]
    in_flight = float(len(ages))
    for i, reading in enumerate(flight.readings):
        parts = max(1, math.ceil(float(flight.advance[i]) / (max_tokens / PARTS)))
        advance = float(flight.advance[i]) / parts
        ended = None if math.isnan(flight.ended[i]) else float(flight.ended[i]) / parts
        for part in range(1, parts + 1):
            at = part / parts
            runs = before.running + (reading.running - before.running) * (at - 0.5 / parts)
            # Without a queue all run, also those that end before the next line.
            count = min(len(ages), max(1, round(runs))) if before.waiting + reading.waiting else len(ages)
            seen = ages[:count].copy()
            chances = chance(seen, advance)
            exposures.append(Exposure(i, seen, advance, ended))
            if ended is None:
                ends = _systematic(chances, rng)
            else:
                owed += ended
                number = min(count, int(owed + 1e-9))
                owed -= number
                ends = _weighted(chances, number, rng)
            ages[:count] = np.minimum(limit, seen + advance)
            ages = np.delete(ages, ends)
            new = round(in_flight + (reading.in_flight - in_flight) * at) - len(ages)
            if new < 0 and part == parts:  # more ended than was thought: the oldest
                ages = np.delete(ages, np.argsort(-ages[: max(count, -new)], kind="stable")[:-new])
            elif new > 0 and not flight.at_once:
                new = max(0, min(new, flight.requests - sent))
                fresh = rng.random(new) * advance if reading.waiting < 1 else np.zeros(new)
                ages = np.concatenate([ages, fresh])
                sent += new
        before, in_flight = reading, reading.in_flight
        sums.append(float(ages[: round(reading.running)].sum()))
    running = min(len(ages), round(flight.readings[-1].running))
    counted = all(r.prompt_tokens is not None for r in flight.readings)
    if flight.prompt_tokens and counted and np.isnan(flight.ended).any():
        # Prompts tell how many were started; of those that wait some may not have been.
        started = sum(r.prompt_tokens or 0.0 for r in flight.readings) / flight.prompt_tokens
        sent = min(flight.requests, max(sent, round(started)))
        sent = max(len(ages), min(sent, round(started + flight.readings[-1].waiting)))
    return Population(ages=ages, running=running, sent=sent), exposures, np.array(sums)


def _systematic(chances: Array, rng: np.random.Generator) -> npt.NDArray[np.intp]:
    """Each ends with its chance; their number is the expected one, up or down by less than one."""
    order = rng.permutation(len(chances))
    total = np.cumsum(np.clip(chances[order], 0.0, 1.0)) + rng.random()
    hit = (
        np.floor(total) > np.floor(np.concatenate([[total[0] - chances[order[0]]], total[:-1]]))
        if len(total)
        else total > 0
    )
    return np.asarray(order[hit], dtype=np.intp)


def _weighted(chances: Array, number: int, rng: np.random.Generator) -> npt.NDArray[np.intp]:
    """So many of them, in proportion to their chances (Efraimidis and Spirakis, 2006)."""
    if number <= 0:
        return np.zeros(0, dtype=np.intp)
    odds = np.maximum(chances, 1e-12) / np.maximum(1.0 - chances, 1e-9)
    keys = rng.exponential(size=len(odds)) / odds
    return np.asarray(np.argpartition(keys, number - 1)[:number], dtype=np.intp)
