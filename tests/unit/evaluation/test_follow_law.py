"""Laws of the answers are told apart by ends at known ages."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.evaluation.follow_law import end_likelihood, table_of, table_of_family
from autotune.evaluation.follow_replay import Exposure
from autotune.physics.laws import law_of, lognormal_law
from autotune.physics.lengths_prior import broad_family

MEANS = (600.0, 1750.0, 3200.0)
TABLE = table_of([lognormal_law(mean=mean, sigma=0.6, max_tokens=4000) for mean in MEANS], 4000)


def test_chances_and_lengths_follow_the_law() -> None:
    table = table_of([law_of([(1000.0, 0.5), (3000.0, 0.5)], "two")], 4000)
    ages = np.array([0.0, 2000.0, 3900.0])
    assert table.chance(0, ages, 1500.0) == pytest.approx([0.5, 1.0, 1.0], abs=0.05)
    assert table.chance(0, ages[:2], 500.0) == pytest.approx([0.0, 0.0], abs=0.05)
    drawn = table.lengths(0, np.zeros(4000), np.random.default_rng(1))
    assert drawn.mean() == pytest.approx(2000, rel=0.03)
    assert table.lengths(0, np.full(500, 1500.0), np.random.default_rng(1)) == pytest.approx([3000.0] * 500, rel=0.02)
    assert table.means() == pytest.approx([2000], rel=0.02)


def test_what_is_longer_than_the_limit_ends_at_it() -> None:
    table = table_of([law_of([(9000.0, 1.0)], "long")], 4000)
    drawn = table.lengths(0, np.full(10, 3999.5), np.random.default_rng(1))
    assert drawn.min() >= 4000
    assert table.chance(0, np.array([3990.0]), 20.0) == pytest.approx([1.0])


def test_tables_of_the_family_fall_from_one_to_nought() -> None:
    table = table_of_family(broad_family(4000), 4000)
    assert table.survival[:, 0] == pytest.approx(np.ones(len(table.survival)))
    assert (table.survival[:, -1] == 0).all()
    assert (np.diff(table.survival, axis=1) < 0).all()


def exposures(law: int, count: int = 400) -> list[Exposure]:
    seen, left = [], float(count)
    for interval in range(20):
        ages = np.full(round(left), 100.0 * interval)
        if len(ages) == 0:
            break
        ended = float(TABLE.chance(law, ages[:1], 100.0)[0]) * len(ages)
        seen.append(Exposure(interval, ages, 100.0, ended))
        left -= ended
    return seen


@pytest.mark.parametrize("law", range(3))
def test_ends_tell_the_law(law: int) -> None:
    assert int(np.argmax(end_likelihood(TABLE, exposures(law)))) == law


def test_only_what_counts_is_counted() -> None:
    seen = exposures(1)
    whole = end_likelihood(TABLE, seen)
    more = [
        Exposure(20, np.zeros(0), 100.0, 3.0),
        Exposure(21, np.full(5, 50.0), 100.0, None),
        Exposure(22, np.full(50, 3990.0), 100.0, 40.0),
    ]
    assert end_likelihood(TABLE, [*seen, *more]) == pytest.approx(whole)
    early = Exposure(0, np.full(5, 50.0), 100.0, 5.0)
    assert end_likelihood(TABLE, [early, *seen[1:]], 1) == pytest.approx(end_likelihood(TABLE, seen, 1))
