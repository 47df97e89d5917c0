"""What is not known of the answers is drawn: broad without ends, narrow around those that were seen."""

from __future__ import annotations

import numpy as np
import pytest

from autotune.evaluation.follow_draws import draw_laws
from autotune.evaluation.follow_loop import USUAL_PROMPT
from autotune.evaluation.follow_replay import read_flight
from autotune.evaluation.follow_series import Reading
from autotune.physics.laws import lognormal_law
from autotune.physics.lengths import KnownLength
from tests.unit.evaluation import follow_runs as runs

ONCE = runs.played(300)
LOOP = runs.played(600, concurrency=60, capacity=4e5)
TRUE = float(np.mean(ONCE.lengths))


def means(readings: tuple[Reading, ...], requests: int, kv: float | None = None) -> np.ndarray:
    flight = read_flight(readings, requests)
    return draw_laws(flight, kv, 4000, None, 32, np.random.default_rng(1)).table.means()


def test_ends_narrow_the_law_around_the_truth() -> None:
    early, late = (means(runs.readings(ONCE.rows[:n]), 300) for n in (1, len(ONCE.rows) // 2))
    assert np.median(late) == pytest.approx(TRUE, rel=0.1)
    assert np.std(late) < np.std(early) / 2


@pytest.mark.parametrize("ends", [True, False])
def test_a_closed_loop_shows_its_law(ends: bool) -> None:
    found = means(runs.readings(LOOP.rows[:40], ends=ends), 600, 4e5)
    assert np.median(found) == pytest.approx(float(np.mean(LOOP.lengths)), rel=0.2)


def test_what_comes_after_the_level_counts_too() -> None:
    found = means(runs.readings(LOOP.rows[:-3]), 600, 4e5)
    assert np.median(found) == pytest.approx(float(np.mean(LOOP.lengths)), rel=0.15)


def test_beside_a_full_cache_ends_count_one_by_one() -> None:
    rows = runs.played(600, concurrency=120, capacity=1.2e5, seed=3).rows[1:40]
    found = means(runs.readings(rows, ends=True), 600, 1.2e5)
    assert np.isfinite(found).all()
    assert 800 < np.median(found) < 3200


def test_lengths_that_are_given_are_taken() -> None:
    known = KnownLength(uncut=lognormal_law(mean=900, sigma=0.5, max_tokens=None), max_tokens=4000)
    flight = read_flight(runs.readings(ONCE.rows[:4]), 300)
    found = draw_laws(flight, None, 4000, known, 8, np.random.default_rng(1))
    assert found.table.means() == pytest.approx([900] * 8, rel=0.03)
    assert found.chosen == tuple(range(8))
    assert found.prompt_tokens == pytest.approx(runs.PROMPT)
    assert found.chance(0)(np.zeros(3), 4000.0) == pytest.approx([1.0] * 3)


def test_prompts_that_are_not_seen_are_usual_ones() -> None:
    flight = read_flight(runs.readings(ONCE.rows[:4], prompts=False), 300)
    found = draw_laws(flight, None, 4000, None, 8, np.random.default_rng(1))
    assert found.prompt_tokens == USUAL_PROMPT


def test_where_prompts_are_not_counted_the_cache_tells_them() -> None:
    flight = read_flight(runs.readings(LOOP.rows[:30], prompts=False), 600)
    found = draw_laws(flight, 4e5, 4000, None, 8, np.random.default_rng(1))
    assert found.prompt_tokens == pytest.approx(runs.PROMPT, rel=1.1)
    assert all(np.isnan(f.ended).all() for f in found.flights)
