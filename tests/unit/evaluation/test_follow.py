"""Forecasts of runs under way, against runs that were played to their end."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from autotune.errors import InputError
from autotune.evaluation.follow import FollowForecast, follow, follow_completions, follow_files
from autotune.evaluation.follow_series import Reading, RunSeries
from autotune.evaluation.follow_tables import Completions
from autotune.physics.lengths import AnswerLengths, observed_lengths
from autotune.records.codec import encode
from autotune.records.lengths import AnswerLength, Lengths
from tests.unit.evaluation import follow_runs as runs

ONCE = runs.played(160)
LOOP = runs.played(400, concurrency=40, capacity=4e5)
TIGHT = runs.played(200, capacity=1.5e5)


def series(readings: tuple[Reading, ...], *, capacity: int | None = 2_000_000, engines: int = 1) -> RunSeries:
    return RunSeries(readings=readings, source="log", kv_capacity_tokens=capacity, engines=engines)


def known(played: runs.Played) -> AnswerLengths:
    answers = tuple(AnswerLength(tokens=n, ended=n < 4000) for n in played.lengths)
    return observed_lengths(Lengths(prompt_tokens=(), answers=answers, max_tokens=4000, source="here"), 4000)


def holds(found: FollowForecast, truth: float, within: float) -> None:
    assert found.low_s <= truth <= found.high_s
    assert found.forecast_s == pytest.approx(truth, rel=within)
    assert found.remaining_s == pytest.approx(found.forecast_s - found.elapsed_s, abs=0.2)
    assert not found.done


def test_sent_at_once() -> None:
    found = follow(series(runs.readings(ONCE.rows)), requests=160, max_tokens=4000, at_s=ONCE.end_s * 0.4)
    holds(found, ONCE.end_s, 0.25)
    assert (found.length_source, found.level, found.kv_full_at_s) == ("observed+prior", 0.95, None)
    assert any("prior" in limit for limit in found.limits)


def test_given_lengths_are_taken() -> None:
    run, at_s = series(runs.readings(ONCE.rows)), ONCE.end_s * 0.3
    found = follow(run, requests=160, max_tokens=4000, at_s=at_s, lengths=known(ONCE))
    holds(found, ONCE.end_s, 0.25)
    assert found.length_source == "observed"
    assert not any("broad prior" in limit for limit in found.limits)
    short = dataclasses.replace(ONCE, lengths=tuple(min(n, 2000) for n in ONCE.lengths))
    less = follow(run, requests=160, max_tokens=4000, at_s=at_s, lengths=known(short))
    assert less.remaining_s < 0.7 * found.remaining_s


@pytest.mark.parametrize("ends", [True, False])
def test_a_closed_loop(ends: bool) -> None:
    run = series(runs.readings(LOOP.rows, ends=ends), capacity=400_000)
    found = follow(run, requests=400, max_tokens=4000, at_s=LOOP.end_s * 0.4)
    holds(found, LOOP.end_s, 0.25)
    assert any("is not seen" in limit for limit in found.limits) != ends
    assert any("fewer sequences" in limit for limit in found.limits)


def test_when_the_cache_fills() -> None:
    assert TIGHT.full_at_s is not None
    run = series(runs.readings(TIGHT.rows), capacity=150_000)
    before = follow(run, requests=200, max_tokens=4000, at_s=TIGHT.full_at_s * 0.7)
    assert before.elapsed_s < TIGHT.full_at_s
    assert before.kv_full_at_s == pytest.approx(TIGHT.full_at_s, rel=0.2, abs=6)
    after = follow(run, requests=200, max_tokens=4000, at_s=TIGHT.end_s * 0.6)
    assert after.kv_full_at_s == pytest.approx(TIGHT.full_at_s, abs=12)
    assert after.low_s <= TIGHT.end_s <= after.high_s


def test_two_engines_share_the_load() -> None:
    rows = [dataclasses.replace(r, running=2 * r.running, gen_tps=2 * r.gen_tps) for r in ONCE.rows]
    run = series(runs.readings(rows), capacity=4_000_000, engines=2)
    found = follow(run, requests=320, max_tokens=4000, at_s=ONCE.end_s * 0.5)
    assert found.low_s <= ONCE.end_s <= found.high_s


def test_over() -> None:
    for lengths in (None, known(ONCE)):
        found = follow(series(runs.readings(ONCE.rows)), requests=160, max_tokens=4000, lengths=lengths)
        assert found.done
        assert found.remaining_s == 0
        assert found.length_source == "observed"
        assert found.forecast_s == found.low_s == found.high_s == found.elapsed_s
        assert found.elapsed_s == pytest.approx(ONCE.end_s, abs=11)
    full = follow(series(runs.readings(TIGHT.rows)), requests=200, max_tokens=4000)
    assert full.kv_full_at_s == pytest.approx(TIGHT.full_at_s, abs=12)


def test_idle_lines_around_it_change_nothing() -> None:
    idle = [runs.Row(10.0 * i, 0, 0, 0, 0, 0, 0) for i in range(1, 30)]
    late = [dataclasses.replace(row, t_s=row.t_s + 290) for row in ONCE.rows]
    plain = follow(series(runs.readings(ONCE.rows)), requests=160, max_tokens=4000, at_s=60)
    assert follow(series(runs.readings([*idle, *late])), requests=160, max_tokens=4000, at_s=60) == plain
    after = [dataclasses.replace(row, t_s=row.t_s + ONCE.rows[-1].t_s) for row in idle]
    found = follow(series(runs.readings([*ONCE.rows, *after])), requests=160, max_tokens=4000)
    assert found.done


def test_broken_off_with_nothing_in_flight() -> None:
    cut = [*LOOP.rows[:20], dataclasses.replace(LOOP.rows[20], running=0, waiting=0)]
    run = series(runs.readings(cut, ends=True), capacity=400_000)
    found = follow(run, requests=400, max_tokens=4000)
    assert not found.done
    assert any("fewer answers ended" in limit for limit in found.limits)
    assert found.forecast_s > found.elapsed_s


def test_a_restart_after_it() -> None:
    run = series(runs.readings(ONCE.rows[:8]))
    after = Reading(t_s=400, span_s=10, output_tokens=0, running=0, waiting=0)
    found = follow(
        dataclasses.replace(run, readings=(*run.readings, after), life_starts=(395.0,)), requests=160, max_tokens=4000
    )
    assert not found.done
    assert any("began anew" in limit for limit in found.limits)


def test_what_is_not_seen_is_told() -> None:
    run = series(runs.readings(ONCE.rows, prompts=False, kv=False), capacity=None)
    found = follow(run, requests=160, max_tokens=4000, at_s=60)
    told = " ".join(found.limits)
    assert "size of the KV cache is not known" in told
    assert "prompt lengths are not seen" in told
    assert found.kv_full_at_s is None


def test_it_is_the_same_again() -> None:
    run = series(runs.readings(ONCE.rows))
    first, again = (follow(run, requests=160, max_tokens=4000, at_s=50) for _ in range(2))
    assert first == again


def test_no_load() -> None:
    idle = series(runs.readings([runs.Row(10.0 * i, 0, 0, 0, 0, 0, 0) for i in range(1, 5)]))
    with pytest.raises(InputError, match="no load"):
        follow(idle, requests=10, max_tokens=100)
    with pytest.raises(InputError, match="in the first 2 s"):
        follow(series(runs.readings(ONCE.rows)), requests=160, max_tokens=4000, at_s=2)


def test_more_in_flight_than_there_are() -> None:
    with pytest.raises(InputError, match="more than the 50") as caught:
        follow(series(runs.readings(ONCE.rows)), requests=50, max_tokens=4000)
    assert caught.value.hint


def test_completions_alone() -> None:
    ends = Completions(times_s=tuple(60.0 * i for i in range(1, 11)), counts=(5.0,) * 10)
    found = follow_completions(ends, requests=100)
    assert (found.length_source, found.elapsed_s, found.kv_full_at_s) == ("completions", 600, None)
    assert any("wide" in limit for limit in found.limits)
    assert found.remaining_s == pytest.approx(found.forecast_s - 600, abs=0.2)
    assert follow_completions(ends, requests=50).done


def test_all_sources_of_one_run_agree(tmp_path: Path) -> None:
    paths = [
        [runs.write_csv(tmp_path / "a.csv", ONCE.rows)],
        [runs.write_log(tmp_path / "a.log", ONCE.rows)],
        [runs.write_scrapes(tmp_path / "a.jsonl", ONCE.rows)],
        runs.write_pages(tmp_path, ONCE.rows),
    ]
    for source in paths:
        found = follow_files(source, requests=160, max_tokens=4000, at_s=ONCE.end_s * 0.4)
        holds(found, ONCE.end_s, 0.25)
        assert found.elapsed_s == pytest.approx(ONCE.end_s * 0.4, abs=11)
    ends = "\n".join(f"{row.t_s},{row.ended}" for row in ONCE.rows)
    client = tmp_path / "client.csv"
    client.write_text(f"t_s,completions\n{ends}\n")
    wide = follow_files([client], requests=160, max_tokens=4000, at_s=ONCE.end_s * 0.4)
    assert wide.length_source == "completions"


def test_json() -> None:
    data = encode(follow_completions(Completions(times_s=(60.0, 120.0), counts=(1.0, 2.0)), requests=9))
    assert list(data) == [
        "schema",
        "elapsed_s",
        "forecast_s",
        "remaining_s",
        "low_s",
        "high_s",
        "level",
        "done",
        "length_source",
        "kv_full_at_s",
        "limits",
    ]
    assert data["schema"] == "autotune/follow/1"


def test_one_after_the_other() -> None:
    rows = [runs.Row(10.0 * i, 20.0, 50.0, 1, 0, 0.001, 0) for i in range(1, 7)]
    found = follow(series(runs.readings(rows)), requests=100, max_tokens=4000)
    # 100 prompts of 1 or more tokens and at most 4,000 tokens each, at 50 tokens/s.
    assert 100 < found.forecast_s < 100 * 4000 / 50 * 1.3
    assert found.low_s < found.forecast_s < found.high_s
