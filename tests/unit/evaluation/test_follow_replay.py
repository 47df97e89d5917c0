"""Who is in flight and how far each one is, from running, waiting and tokens."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from autotune.evaluation.follow_replay import queued_beside_room, read_flight, replay, with_prompts
from autotune.evaluation.follow_series import Reading
from tests.unit.evaluation import follow_runs as runs

Array = npt.NDArray[np.float64]
ONCE = runs.played(160)
LOOP = runs.played(300, concurrency=40)


def never(ages: Array, advance: float) -> Array:
    return np.zeros(len(ages))


def even(ages: Array, advance: float) -> Array:
    return np.full(len(ages), min(1.0, advance / 1500))


def test_sent_at_once() -> None:
    flight = read_flight(runs.readings(ONCE.rows[:12]), 160)
    assert (flight.at_once, flight.draining, flight.plateau, flight.concurrency) == (True, False, 0, 160)
    assert flight.ended.sum() == sum(row.ended for row in ONCE.rows[:12])
    assert flight.finished == flight.ended.sum()
    assert flight.prompt_tokens == pytest.approx(runs.PROMPT)
    assert not flight.full.any()


def test_all_tokens_are_written_by_those_that_run() -> None:
    flight = read_flight(runs.readings(ONCE.rows[:3]), 160)
    assert flight.advance[:3] == pytest.approx([10 / (0.02 + 5e-5 * 160 + 1e-8 * 2e5)] * 3, rel=0.15)


def test_a_closed_loop_whose_ends_are_not_seen() -> None:
    flight = read_flight(runs.readings(LOOP.rows[:15]), 300)
    assert (flight.at_once, flight.draining, flight.concurrency, flight.plateau) == (False, False, 40, 15)
    assert flight.finished is None
    assert flight.prompt_tokens is None
    shown = with_prompts(flight, runs.PROMPT)
    assert shown.ended.sum() == pytest.approx(sum(row.ended for row in LOOP.rows[:15]), abs=41)


def test_a_closed_loop_whose_ends_are_seen() -> None:
    flight = read_flight(runs.readings(LOOP.rows[:15], ends=True), 300)
    assert flight.finished == sum(row.ended for row in LOOP.rows[:15])
    assert flight.prompt_tokens == pytest.approx(runs.PROMPT, rel=0.02)


def test_a_closed_loop_that_has_sent_everything() -> None:
    rows = LOOP.rows[:-2]
    assert rows[-1].running < 30
    flight = read_flight(runs.readings(rows), 300)
    assert flight.draining
    assert flight.finished == 300 - rows[-1].running
    assert flight.plateau < len(rows)
    assert read_flight(runs.readings(rows, ends=True), 300).finished == flight.finished


def test_a_queue_beside_an_empty_cache_is_the_sequence_limit() -> None:
    played = runs.played(160, seqs=32)
    readings = runs.readings(played.rows[:8])
    assert len(queued_beside_room(readings)) == 8
    assert read_flight(readings, 160).plateau == 8
    assert queued_beside_room(runs.readings(ONCE.rows[:8])) == []


def test_ends_beside_a_full_cache_stay_unseen() -> None:
    rows = [runs.Row(10.0 * i, 40.0, 400.0, 20, 4 if i > 3 else 0, 0.999 if i > 3 else 0.5, 0) for i in range(1, 7)]
    shown = with_prompts(read_flight(runs.readings(rows), 200), 200.0)
    assert np.isnan(shown.ended).tolist() == [False] * 3 + [True] * 3
    population, _, _ = replay(shown, never, 4000, np.random.default_rng(1))
    # 12 prompts' worth of tokens began, and no fewer than are in flight were sent.
    assert population.sent == 24


def test_replay_keeps_the_numbers_in_flight() -> None:
    for played, requests, ends in ((ONCE, 160, False), (LOOP, 300, True), (LOOP, 300, False)):
        flight = read_flight(runs.readings(played.rows[:7], ends=ends), requests)
        population, exposures, sums = replay(flight, even, 4000, np.random.default_rng(1))
        last = played.rows[6]
        assert len(population.ages) == last.running + last.waiting
        assert population.running == last.running
        assert population.sent <= requests
        assert len(sums) == 7
        assert sums[-1] == pytest.approx(population.ages[: population.running].sum())
        assert population.ages.min() >= 0
        assert population.ages.max() <= 4000
        assert {e.interval for e in exposures} == set(range(7))


def test_ages_of_a_run_sent_at_once_are_the_token_clock() -> None:
    flight = read_flight(runs.readings(ONCE.rows[:6]), 160)
    population, exposures, _ = replay(flight, even, 4000, np.random.default_rng(1))
    assert population.ages == pytest.approx([flight.advance.sum()] * len(population.ages))
    assert sum(e.ended or 0 for e in exposures) == pytest.approx(flight.ended.sum())
    assert population.sent == 160


def test_those_that_wait_do_not_grow() -> None:
    flight = read_flight(runs.readings(runs.played(160, seqs=32).rows[:3]), 160)
    population, _, _ = replay(flight, never, 4000, np.random.default_rng(1))
    assert (population.ages[population.running + 2 :] == 0).all()


def test_more_ends_than_the_law_expects_take_the_oldest() -> None:
    rows = [runs.Row(10, 800.0, 400.0, 40, 0, 0.1, 0), runs.Row(20, 0.0, 400.0, 40, 0, 0.1, 0)]
    rows += [runs.Row(30, 0.0, 400.0, 10, 0, 0.1, 0), runs.Row(40, 0.0, 400.0, 10, 0, 0.1, 0)]
    population, _, _ = replay(read_flight(runs.readings(rows), 100), never, 4000, np.random.default_rng(1))
    assert len(population.ages) == 10


def test_prompts_tell_how_many_were_sent() -> None:
    flight = read_flight(runs.readings(LOOP.rows[:15]), 300)
    known = with_prompts(flight, runs.PROMPT)
    population, _, _ = replay(known, never, 4000, np.random.default_rng(1))
    assert population.sent == pytest.approx(sum(row.ended for row in LOOP.rows[:15]) + 40, abs=45)


def test_one_reading_is_enough() -> None:
    one = [Reading(t_s=10, span_s=10, output_tokens=500, running=5, waiting=0)]
    flight = read_flight(one, 20)
    population, _, _ = replay(flight, even, 100, np.random.default_rng(1))
    assert len(population.ages) == 5
    assert read_flight([Reading(t_s=10, span_s=10, output_tokens=0, running=0, waiting=5)], 5).at_once
    empty = read_flight([Reading(t_s=10, span_s=10, output_tokens=90, running=0, waiting=0)], 5)
    assert len(replay(empty, even, 100, np.random.default_rng(1))[0].ages) == 0
