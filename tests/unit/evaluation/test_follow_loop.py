"""Laws of the answers are told apart by the prompts and the KV use of a closed loop."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from autotune.evaluation.follow_law import table_of
from autotune.evaluation.follow_loop import loop_likelihood
from autotune.evaluation.follow_replay import read_flight
from autotune.physics.laws import lognormal_law
from tests.unit.evaluation import follow_runs as runs

MEANS = (600.0, 1750.0, 3200.0)
TABLE = table_of([lognormal_law(mean=mean, sigma=0.6, max_tokens=4000) for mean in MEANS], 4000)
LOOP = runs.played(600, concurrency=60, capacity=4e5)


def fit(rows: tuple[runs.Row, ...], **shown: bool) -> tuple[int, float]:
    readings = runs.readings(rows, **shown)
    flight = read_flight(readings, 600)
    found = loop_likelihood(TABLE, flight, 4e5)
    best = int(np.argmax(found.log_likelihood))
    return best, float(found.prompt_tokens[best])


@pytest.mark.parametrize("shown", [{"ends": True}, {"kv": False}, {}])
def test_a_closed_loop_tells_the_law_and_the_prompts(shown: dict[str, bool]) -> None:
    true = float(np.mean(LOOP.lengths))
    assert min(MEANS, key=lambda mean: abs(mean - true)) == MEANS[1]
    best, prompt = fit(LOOP.rows[:40], **shown)
    assert best == 1
    assert prompt == pytest.approx(runs.PROMPT, rel=0.15)


def test_kv_tokens_alone_tell_the_law() -> None:
    best, prompt = fit(LOOP.rows[:40], prompts=False)
    assert best == 1
    assert 100 <= prompt <= 400


def test_without_anything_all_laws_are_alike() -> None:
    readings = runs.readings(LOOP.rows[:5], prompts=False, kv=False)
    flight = read_flight(readings, 600)
    found = loop_likelihood(TABLE, flight, None)
    assert found.log_likelihood == pytest.approx([0.0] * 3)
    silent = tuple(dataclasses.replace(r, prompt_tokens=0.0) for r in readings)
    quiet = loop_likelihood(TABLE, read_flight(silent, 600), None)
    assert quiet.log_likelihood == pytest.approx([0.0] * 3)


def test_no_more_can_be_sent_than_there_are() -> None:
    readings = runs.readings(LOOP.rows[:40], prompts=False, kv=False)
    found = loop_likelihood(TABLE, read_flight(readings, 90), None).log_likelihood
    assert found[0] < found[1] < found[2] <= 0


@pytest.mark.parametrize("ends", [True, False])
def test_starts_after_the_cache_was_full_count(ends: bool) -> None:
    full = runs.played(600, concurrency=120, capacity=1.5e5)
    assert full.full_at_s is not None
    assert full.full_at_s >= 45
    readings = runs.readings(full.rows[:20], ends=ends)
    flight = read_flight(readings, 600)
    found = loop_likelihood(TABLE, flight, None)
    assert np.isfinite(found.log_likelihood).all()
    assert int(np.argmax(found.log_likelihood)) == 1
