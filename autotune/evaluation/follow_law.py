"""What lengths the answers of a run under way have: a posterior over a broad family, from ends at known ages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.evaluation.follow_replay import Exposure, Flight
from autotune.physics.laws import LengthLaw
from autotune.physics.lengths_prior import TRUST, LawFamily

Array = npt.NDArray[np.float64]

CELLS = 144
"""Cells of the age axis up to the output limit."""
AT_LIMIT = 3
"""Cells below the limit in which the token clock cannot tell whether the limit was reached."""
JOINED = 4.0
"""Ends that are joined to one Poisson count."""
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


@dataclass(frozen=True)
class LawTable:
    """Survival of some laws on a grid of ages up to the limit; the last entry is what is cut (0 beyond)."""

    cell: float
    survival: Array
    """(laws, CELLS + 1): share longer than cell x index; at the limit all have ended."""

    def chance(self, law: int, ages: Array, advance: float) -> Array:
        """Chance that answers of these ages end within ``advance`` tokens."""
        now, then = self._at(law, ages), self._at(law, ages + advance)
        return np.asarray(np.clip(1.0 - then / np.maximum(now, 1e-12), 0.0, 1.0))

    def lengths(self, law: int, ages: Array, rng: np.random.Generator) -> Array:
        """Lengths of answers that are longer than ``ages``, drawn."""
        row = self.survival[law]
        level = rng.random(len(ages)) * self._at(law, ages)
        # Survival falls with age: search it from the end.
        found = np.interp(level, row[::-1], np.arange(CELLS, -1, -1.0) * self.cell)
        return np.asarray(np.maximum(found, ages + 1.0))

    def _at(self, law: int, ages: Array) -> Array:
        return np.asarray(np.interp(ages, np.arange(CELLS + 1) * self.cell, self.survival[law], right=0.0))

    def means(self) -> Array:
        """Mean lengths, tokens."""
        return np.asarray((self.survival[:, 1:] + self.survival[:, :-1]).sum(axis=1) / 2 * self.cell)


def table_of(laws: Sequence[LengthLaw], max_tokens: int) -> LawTable:
    """Laws that are given."""
    cell = max_tokens / CELLS
    grid = [cell * i for i in range(CELLS)]
    rows = [[law.survival(age) for age in grid] + [0.0] for law in laws]
    return LawTable(cell, _strict(np.array(rows)))


def table_of_family(family: LawFamily, max_tokens: int) -> LawTable:
    """Members of the family, cut at the limit."""
    cell = max_tokens / CELLS
    # An answer has at least a token: the first cell starts from 1.
    survival = family.survival(np.maximum(np.arange(CELLS + 1) * cell, 1e-6))
    survival[:, 0] = 1.0
    return LawTable(cell, _strict(survival))


def _strict(survival: Array) -> Array:
    """Strictly falling, so that it can be inverted; all end at the limit."""
    survival = np.minimum.accumulate(np.maximum(survival, 0.0), axis=1)
    survival = survival * (1.0 - 1e-9) + np.linspace(1e-9, 0.0, survival.shape[1])[None, :]
    cut = survival.copy()
    cut[:, -1] = 0.0
    return cut


def end_likelihood(table: LawTable, exposures: Sequence[Exposure], first: int = 0) -> Array:
    """Log-likelihood of each law (Poisson, parts joined until a few ends).

    Args:
        first: interval from which on they count.
    """
    total = np.zeros(len(table.survival))
    expected, seen = np.zeros(len(table.survival)), 0.0
    for exposure in exposures:
        if exposure.interval < first or exposure.ended is None or len(exposure.ages) == 0:
            continue
        place = exposure.ages / table.cell
        if (place > CELLS - AT_LIMIT).mean() > 0.5:
            continue  # most are at the limit: the clock's own error decides when they end
        counts = np.bincount(np.minimum(place, CELLS - 1).astype(int), minlength=CELLS).astype(float)
        cells = np.nonzero(counts)[0]
        middle: Array = cells.astype(np.float64) + 0.5
        now = _shifted(table.survival, middle)
        then = _shifted(
            table.survival, np.asarray(np.minimum(middle + exposure.advance / table.cell, CELLS), dtype=float)
        )
        expected += ((1.0 - then / np.maximum(now, 1e-12)) * counts[cells]).sum(axis=1)
        seen += exposure.ended
        if seen >= JOINED:
            rate = np.maximum(expected, 1e-6)
            total += seen * np.log(rate) - rate
            expected, seen = np.zeros_like(expected), 0.0
    rate = np.maximum(expected, 1e-6)
    return np.asarray(total + seen * np.log(rate) - rate)


def _shifted(survival: Array, places: Array) -> Array:
    low = np.minimum(places.astype(int), CELLS - 1)
    part = places - low
    return np.asarray(survival[:, low] * (1 - part) + survival[:, low + 1] * part)


@dataclass(frozen=True)
class LoopFit:
    """How well each law explains a closed loop whose ends are not seen."""

    log_likelihood: Array
    """Tempered: see ``lengths_prior.TRUST``."""
    prompt_tokens: Array
    """Mean of a prompt that goes with each law best; NaN: not seen."""


def loop_likelihood(table: LawTable, flight: Flight, kv_tokens: Array) -> LoopFit:
    """A closed loop is a renewal process on the token clock: what it shows of prompts and of the KV cache.

    Each end starts a request whose prompt shows in the prompt tokens; the mean prompt is not known, and the
    best one is taken for each law. The KV tokens are prompts and ages of those in flight.

    Args:
        kv_tokens: in use at the end of each interval; NaN: not seen.
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
    usable &= np.isfinite(kv_tokens) & (kv_tokens > 0) & (level >= 0.9 * level.max()) & ~flight.full
    if usable.any():
        held = np.stack([np.interp(clock[usable], grid, row) for row in ages])
        usual = np.where(np.isfinite(prompts), prompts, USUAL_PROMPT)
        misses = np.log((held + usual[:, None]) * level[usable][None, :] / kv_tokens[usable][None, :])
        usage = np.array([r.kv_usage or 1.0 for r in flight.readings])[usable]
        total = total + _kv_fit(misses, clock[usable], table.means(), flight.concurrency, KV_STEP / usage)
    # While the level holds, no more can have been sent than there are.
    sent = began[:, : flight.plateau].sum(axis=1)
    return LoopFit(total - 50.0 * np.maximum(0.0, sent / flight.requests - 1.0), prompts)


def _kv_fit(misses: Array, clock: Array, means: Array, in_flight: int, rounding: Array) -> Array:
    """Likelihood of the KV tokens: mean misses of a few stretches.

    The ages of so many in flight add up to their expectation within ``AGE_SD`` over the root of their number,
    and are new after about one answer.
    """
    edges = _fine_at_start(len(clock), KV_GROUPS)
    ends = np.append(edges[1:], len(clock)) - 1
    sizes = np.diff(np.append(edges, len(clock)))
    mean = np.add.reduceat(misses, edges, axis=1) / sizes[None, :]
    lasting = (clock[ends] - np.where(edges > 0, clock[np.maximum(edges - 1, 0)], 0.0))[None, :] / means[:, None]
    coarse = np.add.reduceat(rounding, edges) / sizes
    # Sent at once, all have the same age; chance comes in as they are replaced.
    replaced = np.minimum(1.0, clock[ends][None, :] / means[:, None])
    variance = KV_SD**2 + coarse[None, :] ** 2 + replaced * AGE_SD**2 / max(1, in_flight) / (1.0 + lasting)
    # Stretches shorter than an answer repeat each other.
    weight = np.minimum(1.0, lasting + 0.2)
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
