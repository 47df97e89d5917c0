"""What lengths the answers of a run under way have: a posterior over a broad family, from ends at known ages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.evaluation.follow_replay import Exposure, Flight
from autotune.physics.laws import LengthLaw
from autotune.physics.lengths_prior import LawFamily, broad_family, resample, weigh

Array = npt.NDArray[np.float64]

CELLS = 160
"""Cells of the age axis up to the output limit."""
MEMBERS = 3000
AT_LIMIT = 3
"""Cells below the limit in which the token clock cannot tell whether the limit was reached."""
JOINED = 4.0
"""Ends that are joined to one Poisson count."""
RENEWAL_MEMBERS, RENEWAL_INTERVALS = 1000, 50
KV_SD, KV_READINGS = 0.06, 6.0
"""Error of the KV tokens that a law predicts, and how many independent readings a run is worth at most."""


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

    def mean(self, law: int) -> float:
        """Mean length, tokens."""
        row = self.survival[law]
        return float((row[1:] + row[:-1]).sum() / 2 * self.cell)


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


def end_likelihood(table: LawTable, exposures: Sequence[Exposure]) -> tuple[Array, float]:
    """Log-likelihood of each law (Poisson, parts joined until a few ends), and the number of ends."""
    total = np.zeros(len(table.survival))
    expected, seen, events = np.zeros(len(table.survival)), 0.0, 0.0
    for exposure in exposures:
        if exposure.ended is None or len(exposure.ages) == 0:
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


def kv_likelihood(table: LawTable, flight: Flight, kv_tokens: Array, prompt_tokens: float) -> Array:
    """Log-likelihood of each law from KV tokens where ends are not seen: a closed loop is a renewal process.

    Args:
        kv_tokens: in use at the end of each interval; NaN: not seen.
    """
    groups = np.array_split(np.arange(len(flight.advance)), min(RENEWAL_INTERVALS, len(flight.advance)))
    clock = np.cumsum(flight.advance)
    at = np.array([clock[g[-1]] for g in groups])
    level = np.array([flight.readings[g[-1]].running for g in groups])
    members = len(table.survival)
    starts = np.zeros((members, len(at) + 1))
    begun = np.concatenate([[0.0], at])
    starts[:, 0] = level[0]
    total, used = np.zeros(members), 0
    before = np.full(members, level[0])
    for i, now in enumerate(at):
        ages = now - (begun[: i + 1] + np.concatenate([[0.0], at[:i]])) / 2 if i else np.array([now])
        ages[0] = now
        alive = starts[:, : i + 1] * _shifted(table.survival, np.clip(ages / table.cell, 0.0, CELLS))
        count = alive.sum(axis=1)
        starts[:, i + 1] = np.maximum(0.0, level[i] - count)
        held = (alive * (ages + prompt_tokens)).sum(axis=1) + starts[:, i + 1] * prompt_tokens
        seen = kv_tokens[groups[i][-1]]
        if np.isfinite(seen) and seen > 0:
            total -= 0.5 * (np.log(np.maximum(held, 1.0) / seen) / KV_SD) ** 2
            used += 1
        before = count
    total *= min(1.0, KV_READINGS / max(1, used))
    # Nothing is over while the level holds: no more can have been sent than there are.
    sent = starts.sum(axis=1)
    return total - 50.0 * np.maximum(0.0, sent / flight.requests - 1.0)


def choose(log_likelihoods: Array, events: float, count: int, rng: np.random.Generator) -> npt.NDArray[np.intp]:
    """Members drawn from the posterior."""
    return resample(weigh(log_likelihoods, events), count, rng)
