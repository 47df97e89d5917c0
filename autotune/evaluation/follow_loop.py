"""How well length laws explain a closed loop or a queue, where each end starts another request."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.evaluation.follow_law import CELLS, LawTable
from autotune.evaluation.follow_replay import Flight
from autotune.physics.lengths_prior import TRUST

Array = npt.NDArray[np.float64]

LOOP_CELLS, LOOP_GROUPS = 324, 24
"""A closed loop: cells of the token clock followed from the start, groups of its intervals."""
FREE_READINGS = 4
"""Readings before the cache is full that are enough to go by."""
FOURIER, CIRCLE = 512, 1e-7
"""Length of the transform (above cells and loop cells together), and how far its end is damped."""
LATE_STARTS, LATE_SD = 20.0, 0.08
"""Starts after the cache was full that say something of the mean length, and the relative error of that."""
KV_SD, AGE_SD, KV_GROUPS = 0.03, 0.8, 10
"""KV tokens: relative error beside chance; spread of one age over the mean age; stretches looked at."""
KV_STEP = 0.0005
"""KV use is printed in steps of 0.001: its error."""
PROMPT_VARIANCE, START_SD = 0.4, 0.03
"""Variance of a prompt's length over its mean squared; relative error of starts beside chance."""
USUAL_PROMPT = 300.0
"""Tokens of a prompt where nothing tells."""
PROMPTS, PROMPTS_SD = (50.0, 100.0, 200.0, 400.0, 800.0, 1600.0), 0.8
"""Mean prompts that are tried where nothing shows them, and how far (relative) they may be from the usual one."""


@dataclass(frozen=True)
class LoopFit:
    """How well each law explains a closed loop whose ends are not seen."""

    log_likelihood: Array
    """Tempered: see ``lengths_prior.TRUST``."""
    prompt_tokens: Array
    """Mean of a prompt that goes with each law best; NaN: not seen."""


def loop_likelihood(table: LawTable, flight: Flight, capacity: float | None) -> LoopFit:
    """A closed loop is a renewal process on the token clock: what it shows of starts and of the KV cache.

    Each end starts a request whose prompt shows in the prompt tokens; the mean prompt is not known, and the
    best one is taken for each law. The KV tokens are prompts and ages of those in flight.

    Args:
        capacity: KV tokens of all engines; ``None``: not known, then only how the use changes counts.
    """
    clock = np.cumsum(flight.advance)
    starts, ages, grid = _renewal(table, float(clock[-1]))
    level = np.array([r.running for r in flight.readings])
    begun = np.stack([np.interp(clock, grid, row) for row in starts])
    begun += np.maximum(0.0, clock - grid[-1])[None, :] / table.means()[:, None]
    began = np.diff(begun, prepend=0.0) * level[None, :]
    usable = np.arange(len(level)) < flight.plateau
    free = int(np.argmax(flight.full)) if flight.full.any() else len(level)
    if free >= FREE_READINGS:
        usable[free:] = False  # once sequences were preempted their ages are out of step
    total, prompts = _start_fit(began, flight, usable)
    total = total + _late_fit(table, flight, prompts, free) if free >= FREE_READINGS else total
    usage = np.array([np.nan if r.kv_usage is None else r.kv_usage for r in flight.readings])
    usable &= np.isfinite(usage) & (usage > 0) & (level >= 0.9 * level.max()) & ~flight.full
    if usable.any():
        held = np.stack([np.interp(clock[usable], grid, row) for row in ages])
        seen = usage[usable] * (capacity or 1.0) / level[usable]
        kv = _KvFit(clock[usable], table.means(), flight.concurrency, KV_STEP / usage[usable], capacity is None)
        known = np.isfinite(prompts)
        tried = [np.where(known, prompts, p) for p in ([USUAL_PROMPT] if known.all() else PROMPTS)]
        found = np.stack([kv.likelihood(np.log((held + p[:, None]) / seen[None, :])) for p in tried])
        if len(tried) > 1:
            found = found - 0.5 * ((np.log(PROMPTS) - math.log(USUAL_PROMPT)) / PROMPTS_SD)[:, None] ** 2
        prompts = np.stack(tried)[found.argmax(axis=0), np.arange(len(prompts))]
        total = total + found.max(axis=0) + np.log(np.exp(found - found.max(axis=0)).mean(axis=0))
    # While the level holds, no more can have been sent than there are.
    sent = began[:, : flight.plateau].sum(axis=1)
    return LoopFit(total - 50.0 * np.maximum(0.0, sent / flight.requests - 1.0), prompts)


@dataclass(frozen=True)
class _KvFit:
    """How well predicted KV tokens agree with those seen, over a few stretches.

    The ages of so many in flight add up to their expectation within ``AGE_SD`` over the root of their number,
    and are new after about one answer.
    """

    clock: Array
    means: Array
    in_flight: int
    rounding: Array
    scale_free: bool
    """The capacity is not known: a common factor does not count."""

    def likelihood(self, misses: Array) -> Array:
        """Of each law, from the logarithm of predicted over seen: (laws, readings)."""
        edges = _fine_at_start(len(self.clock), KV_GROUPS)
        ends = np.append(edges[1:], len(self.clock)) - 1
        sizes = np.diff(np.append(edges, len(self.clock)))
        mean = np.add.reduceat(misses, edges, axis=1) / sizes[None, :]
        begin = np.where(edges > 0, self.clock[np.maximum(edges - 1, 0)], 0.0)
        lasting = (self.clock[ends] - begin)[None, :] / self.means[:, None]
        coarse = np.add.reduceat(self.rounding, edges) / sizes
        # Sent at once, all have the same age; chance comes in as they are replaced.
        replaced = np.minimum(1.0, self.clock[ends][None, :] / self.means[:, None])
        chance = replaced * AGE_SD**2 / max(1, self.in_flight) / (1.0 + lasting)
        variance = KV_SD**2 + coarse[None, :] ** 2 + chance
        weight = np.minimum(1.0, lasting + 0.2)  # stretches shorter than an answer repeat each other
        if self.scale_free:
            precision = weight / variance
            mean = mean - (precision * mean).sum(axis=1, keepdims=True) / precision.sum(axis=1, keepdims=True)
        return np.asarray((-0.5 * weight * (mean**2 / variance + np.log(variance))).sum(axis=1))


def _fine_at_start(count: int, groups: int) -> npt.NDArray[np.intp]:
    """Where groups of readings begin: single ones at the start, longer and longer ones later."""
    if count < 2:
        return np.zeros(1, dtype=np.intp)
    edges = np.concatenate([[0], np.geomspace(1, count, groups).round()]).astype(np.intp)
    return np.unique(edges)[:-1]


def _late_fit(table: LawTable, flight: Flight, prompts: Array, free: int) -> Array:
    """Once the cache was full: tokens written for each request that was started are the mean length, about."""
    late = slice(free, flight.plateau)
    written = float(sum(r.output_tokens for r in flight.readings[late]))
    if np.isnan(flight.ended).any():
        seen = np.array([r.prompt_tokens or 0.0 for r in flight.readings])[late].sum() / np.maximum(prompts, 1.0)
    else:
        seen = np.full(len(prompts), flight.ended[late].sum())
    seen = np.where(np.isfinite(seen), seen, 0.0)
    waiting = max((r.waiting for r in flight.readings[late]), default=0.0)
    spread = np.sqrt(1.0 / np.maximum(seen, 1.0) + LATE_SD**2 + (0.5 * waiting / np.maximum(seen, 1.0)) ** 2)
    misses = np.log(np.maximum(seen, 1.0) * table.means() / max(written, 1.0)) / spread
    return np.where(seen > LATE_STARTS, -0.5 * misses**2, 0.0)


def _renewal(table: LawTable, longest: float) -> tuple[Array, Array, Array]:
    """Requests begun and tokens written by those in flight, for one place in flight, on a grid of the clock.

    With f the mass of each length, the starts are the coefficients of 1 / (1 - f(z)): read off by a Fourier
    transform on a circle a little inside the unit circle, where the pole at 1 does no harm.
    """
    cells = int(min(LOOP_CELLS, max(4.0, np.ceil(longest / table.cell) + 1)))
    radius = CIRCLE ** (1.0 / FOURIER)
    damp = radius ** np.arange(FOURIER)
    mass = np.zeros((len(table.survival), FOURIER))
    mass[:, 1 : CELLS + 1] = table.survival[:, :-1] - table.survival[:, 1:]
    aged = np.zeros_like(mass)
    aged[:, : CELLS + 1] = table.survival * (np.arange(CELLS + 1) * table.cell)
    spectrum = 1.0 / (1.0 - np.fft.rfft(mass * damp, axis=1))
    starts = np.fft.irfft(spectrum, FOURIER, axis=1)[:, :cells] / damp[:cells]
    ages = np.fft.irfft(spectrum * np.fft.rfft(aged * damp, axis=1), FOURIER, axis=1)[:, :cells] / damp[:cells]
    return np.asarray(np.cumsum(starts, axis=1)), np.asarray(ages), np.arange(cells, dtype=float) * table.cell


def _start_fit(began: Array, flight: Flight, usable: npt.NDArray[np.bool_]) -> tuple[Array, Array]:
    """Likelihood of the starts that are seen, and the mean prompt that goes with each law.

    Starts are seen as such where ends are; else as prompt tokens, with the best mean prompt for each law.
    """
    members = len(began)
    prompts = np.full(members, np.nan if flight.prompt_tokens is None else flight.prompt_tokens)
    known = not np.isnan(flight.ended).any()
    if not usable.any() or (not known and any(r.prompt_tokens is None for r in flight.readings)):
        return np.zeros(members), prompts
    level = flight.readings[0].running
    growth = np.diff(np.array([r.running for r in flight.readings]), prepend=0.0)
    seen = flight.ended + growth if known else np.array([r.prompt_tokens or 0.0 for r in flight.readings])
    index = np.nonzero(usable)[0]
    # The start tells the prompts from the lengths, all the rest only their ratio: keep the start fine.
    edges = _fine_at_start(len(index), LOOP_GROUPS)
    grouped = np.add.reduceat(seen[index], edges)
    counts = np.maximum(np.add.reduceat(began[:, index], edges, axis=1), 0.3)
    first = np.zeros(len(edges))
    first[0] = level if index[0] == 0 else 0.0  # those sent at once are so many for certain
    spread = 0.0 if known else PROMPT_VARIANCE
    variance = np.maximum(0.0, counts - first) + spread * counts + (START_SD * counts) ** 2 + 0.5
    mean = np.ones(members)
    if not known:
        if grouped.sum() <= 0:
            return np.zeros(members), prompts
        mean = (grouped[None, :] * counts / variance).sum(axis=1) / (counts**2 / variance).sum(axis=1)
        prompts = mean
    errors = (grouped[None, :] / mean[:, None] - counts) ** 2 / variance + np.log(variance)
    # The first group counts in full: it tells the prompts. What follows is the law's, which is not the truth.
    weight = np.full(len(edges), min(1.0, TRUST / max(1.0, float(np.median(counts.sum(axis=1))))))
    weight[0] = 1.0
    return np.asarray(-0.5 * (errors * weight).sum(axis=1)), prompts
