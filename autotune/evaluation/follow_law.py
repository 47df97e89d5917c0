"""Length laws on a grid of ages, and how well they explain ends that were seen one by one at known ages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from autotune.evaluation.follow_replay import Exposure
from autotune.physics.laws import LengthLaw
from autotune.physics.lengths_prior import LawFamily

Array = npt.NDArray[np.float64]

CELLS = 144
"""Cells of the age axis up to the output limit."""
AT_LIMIT = 3
"""Cells below the limit in which the token clock cannot tell whether the limit was reached."""
JOINED = 4.0
"""Ends that are joined to one Poisson count."""


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
        now = shifted(table.survival, middle)
        then = shifted(
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


def shifted(survival: Array, places: Array) -> Array:
    """Survival at places between the cells: (laws, places)."""
    """Survival (laws, places) between the cells; places count in cells."""
    low = np.minimum(places.astype(int), CELLS - 1)
    part = places - low
    return np.asarray(survival[:, low] * (1 - part) + survival[:, low + 1] * part)
