"""What lengths the answers of a run under way have: a posterior over a broad family, from ends at known ages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.evaluation.follow_replay import Exposure, Flight
from autotune.physics.laws import LengthLaw
from autotune.physics.lengths_prior import LawFamily, broad_family

Array = npt.NDArray[np.float64]

CELLS = 160
"""Cells of the age axis up to the output limit."""
MEMBERS = 3000
AT_LIMIT = 3
"""Cells below the limit in which the token clock cannot tell whether the limit was reached."""
JOINED = 4.0
"""Ends that are joined to one Poisson count."""
LOOP_MEMBERS, LOOP_CELLS, LOOP_GROUPS = 1500, 360, 24
"""A closed loop: laws tried, cells of the token clock followed from the start, groups of its intervals."""
FREE_READINGS = 4
"""Readings before the cache is full that are enough to go by."""
LATE_STARTS, LATE_SD = 20.0, 0.08
"""Starts after the cache was full that say something of the mean length, and the relative error of that."""
KV_SD, KV_READINGS = 0.06, 6.0
"""Error of the KV tokens that a law predicts, and how many independent readings a run is worth at most."""
PROMPT_SPREAD, START_SD = 1.4, 0.05
"""Variance of prompt tokens over that of a count (prompts differ in length); relative error of starts beside it."""
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
    survival = family.survival(np.arange(CELLS + 1) * cell)
    survival[:, 0] = 1.0
    return LawTable(cell, _strict(survival))


def prior_table(max_tokens: int, members: int = MEMBERS) -> LawTable:
    """The family before anything is seen."""
    return table_of_family(broad_family(max_tokens, members=members), max_tokens)


def _strict(survival: Array) -> Array:
    """Strictly falling, so that it can be inverted; all end at the limit."""
    survival = np.minimum.accumulate(np.maximum(survival, 0.0), axis=1)
    survival = survival * (1.0 - 1e-9) + np.linspace(1e-9, 0.0, survival.shape[1])[None, :]
    cut = survival.copy()
    cut[:, -1] = 0.0
    return cut


def end_likelihood(table: LawTable, exposures: Sequence[Exposure], first: int = 0) -> tuple[Array, float]:
    """Log-likelihood of each law (Poisson, parts joined until a few ends), and the number of ends.

    Args:
        first: interval from which on they count.
    """
    total = np.zeros(len(table.survival))
    expected, seen, events = np.zeros(len(table.survival)), 0.0, 0.0
    for exposure in exposures:
        if exposure.interval < first or exposure.ended is None or len(exposure.ages) == 0:
            continue
        place = exposure.ages / table.cell
        if (place > CELLS - AT_LIMIT).mean() > 0.5:
            continue  # most are at the limit: the clock's own error decides when they end
        counts = np.bincount(np.minimum(place, CELLS - 1).astype(int), minlength=CELLS).astype(float)
        cells = np.nonzero(counts)[0]
        middle = cells + 0.5
        now = _shifted(table.survival, middle)
        then = _shifted(table.survival, np.minimum(middle + exposure.advance / table.cell, float(CELLS)))
        expected += ((1.0 - then / np.maximum(now, 1e-12)) * counts[cells]).sum(axis=1)
        seen += exposure.ended
        events += exposure.ended
        if seen >= JOINED:
            rate = np.maximum(expected, 1e-6)
            total += seen * np.log(rate) - rate
            expected, seen = np.zeros_like(expected), 0.0
    rate = np.maximum(expected, 1e-6)
    return total + seen * np.log(rate) - rate, events


def _shifted(survival: Array, places: Array) -> Array:
    low = np.minimum(places.astype(int), CELLS - 1)
    part = places - low
    return np.asarray(survival[:, low] * (1 - part) + survival[:, low + 1] * part)


@dataclass(frozen=True)
class LoopFit:
    """How well each law explains a closed loop whose ends are not seen."""

    log_likelihood: Array
    events: float
    """Answers that it rests on."""
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
    total, prompts, events = _start_fit(began, flight, usable)
    total = total + _late_fit(table, flight, prompts, free) if free >= FREE_READINGS else total
    usable &= np.isfinite(kv_tokens) & (kv_tokens > 0) & (level >= 0.9 * level.max()) & ~flight.full
    if usable.any():
        held = np.stack([np.interp(clock[usable], grid, row) for row in ages])
        usual = np.where(np.isfinite(prompts), prompts, USUAL_PROMPT)
        misses = np.log((held + usual[:, None]) * level[usable][None, :] / kv_tokens[usable][None, :]) / KV_SD
        total = total - 0.5 * (misses**2).mean(axis=1) * min(KV_READINGS, float(usable.sum()))
    # While the level holds, no more can have been sent than there are.
    sent = began[:, : flight.plateau].sum(axis=1)
    return LoopFit(total - 50.0 * np.maximum(0.0, sent / flight.requests - 1.0), events, prompts)


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
    """Requests begun and tokens written by those in flight, for one place in flight, on a grid of the clock."""
    cells = int(min(LOOP_CELLS, max(4.0, np.ceil(longest / table.cell) + 1)))
    members = len(table.survival)
    mass = table.survival[:, :-1] - table.survival[:, 1:]
    starts = np.zeros((members, CELLS + cells))
    starts[:, CELLS] = 1.0
    backward = mass[:, ::-1]
    for i in range(1, cells):
        starts[:, CELLS + i] = (starts[:, i : CELLS + i] * backward).sum(axis=1)
    aged = (table.survival * (np.arange(CELLS + 1) + 0.0) * table.cell)[:, ::-1]
    padded = np.concatenate([np.zeros((members, 1)), starts], axis=1)
    ages = np.stack([(padded[:, i : CELLS + 1 + i] * aged).sum(axis=1) for i in range(1, cells + 1)], axis=1)
    return np.cumsum(starts[:, CELLS:], axis=1), ages, np.arange(cells) * table.cell


def _start_fit(began: Array, flight: Flight, usable: npt.NDArray[np.bool_]) -> tuple[Array, Array, float]:
    """Likelihood of the starts that are seen, the mean prompt that goes with each law, and how many starts.

    Starts are seen as such where ends are; else as prompt tokens, with the best mean prompt for each law.
    """
    members = len(began)
    prompts = np.full(members, np.nan if flight.prompt_tokens is None else flight.prompt_tokens)
    known = not np.isnan(flight.ended).any()
    if not usable.any() or (not known and any(r.prompt_tokens is None for r in flight.readings)):
        return np.zeros(members), prompts, 1.0
    growth = np.diff(np.array([r.running for r in flight.readings]), prepend=0.0)
    seen = flight.ended + growth if known else np.array([r.prompt_tokens or 0.0 for r in flight.readings])
    index = np.nonzero(usable)[0]
    # The start tells the prompts from the lengths, all the rest only their ratio: keep the start fine.
    edges = np.concatenate([[0], np.geomspace(1, len(index), LOOP_GROUPS).round()])
    edges = np.unique(edges.astype(int))[:-1] if len(index) > 1 else np.array([0])
    grouped = np.add.reduceat(seen[index], edges)
    counts = np.maximum(np.add.reduceat(began[:, index], edges, axis=1), 0.3)
    variance = (1.0 if known else PROMPT_SPREAD) * counts + (START_SD * counts) ** 2
    mean = np.ones(members)
    if not known:
        if grouped.sum() <= 0:
            return np.zeros(members), prompts, 1.0
        mean = (grouped[None, :] * counts / variance).sum(axis=1) / (counts**2 / variance).sum(axis=1)
        prompts = mean
    errors = (grouped[None, :] / mean[:, None] - counts) ** 2 / variance + np.log(variance)
    return -0.5 * errors.sum(axis=1), prompts, float(grouped.sum() / np.median(mean))
