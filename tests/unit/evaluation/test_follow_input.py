"""Logs, pages, scrapes and tables of a run under way are read as the same series."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autotune.errors import InputError
from autotune.evaluation.follow_input import read_series
from autotune.evaluation.follow_series import RunSeries
from tests.unit.evaluation import follow_runs as runs

RUN = runs.played(60, max_tokens=2000, median=800)
ROWS = RUN.rows
TOKENS = sum(row.gen_tps * 10 for row in ROWS)


def series_of(*paths: Path) -> RunSeries:
    found = read_series(paths)
    assert isinstance(found, RunSeries)
    return found


def text(path: Path, content: str) -> Path:
    path.write_text(content)
    return path


def same_run(found: RunSeries) -> None:
    assert [r.running for r in found.readings] == [row.running for row in ROWS]
    assert sum(r.output_tokens for r in found.readings) == pytest.approx(TOKENS, rel=1e-3)
    assert [r.kv_usage for r in found.readings] == pytest.approx([row.kv for row in ROWS], abs=6e-4)
    assert [r.t_s - found.readings[0].t_s for r in found.readings] == [row.t_s - ROWS[0].t_s for row in ROWS]


def test_a_table(tmp_path: Path) -> None:
    found = series_of(runs.write_csv(tmp_path / "a.csv", ROWS))
    same_run(found)
    assert (found.source, found.engines, found.kv_capacity_tokens) == ("csv", 1, None)


def test_a_log(tmp_path: Path) -> None:
    found = series_of(runs.write_log(tmp_path / "server.log", ROWS))
    same_run(found)
    assert (found.source, found.kv_capacity_tokens) == ("log", 2_000_000)


def test_scrapes(tmp_path: Path) -> None:
    found = series_of(runs.write_scrapes(tmp_path / "load.jsonl", ROWS))
    same_run(found)
    assert found.source == "metrics"
    prompts = sum(r.prompt_tokens or 0 for r in found.readings)
    assert prompts == pytest.approx(60 * runs.PROMPT, rel=0.01)


def test_pages_in_any_order(tmp_path: Path) -> None:
    paths = runs.write_pages(tmp_path, ROWS)
    found = series_of(*paths[::-1])
    same_run(found)
    assert found.kv_capacity_tokens == 2_000_000


def test_pages_without_numbers_go_by_the_time_they_were_written(tmp_path: Path) -> None:
    pages = [text(tmp_path / name, runs.page(tokens, 0, ROWS[0])) for name, tokens in (("b", 100), ("a", 700))]
    for path, at in zip(pages, (1000, 1030), strict=True):
        os.utime(path, (at, at))
    (reading,) = series_of(*pages).readings
    assert (reading.span_s, reading.output_tokens) == (30, 600)


def test_engines_of_a_log_are_added_tick_by_tick(tmp_path: Path) -> None:
    found = series_of(runs.write_log(tmp_path / "s.log", ROWS, engines=2))
    assert found.engines == 2
    assert [r.running for r in found.readings] == [2 * row.running for row in ROWS]


def test_idle_silence_counts_no_tokens(tmp_path: Path) -> None:
    late = runs.Row(ROWS[3].t_s + 600, 0, 100.0, 5, 0, 0.1, 0)
    found = series_of(runs.write_log(tmp_path / "s.log", [*ROWS[:3], late]))
    assert found.readings[-1].output_tokens == pytest.approx(1000)


def test_a_restart_in_a_log(tmp_path: Path) -> None:
    path = runs.write_log(tmp_path / "s.log", ROWS[:4])
    again = [runs.Row(row.t_s + 600, row.prompt_tps, row.gen_tps, row.running, 0, row.kv, 0) for row in ROWS[:4]]
    banner = f"INFO {runs.stamp(590)} [api_server.py:1887] vLLM API server version 0.10.0\n"
    path.write_text(path.read_text() + banner + "\n".join(map(runs.log_line, again)) + "\n")
    found = series_of(path)
    assert len(found.readings) == 8
    assert found.life_starts == (found.readings[4].t_s,)


def test_counters_that_go_back_are_another_server(tmp_path: Path) -> None:
    lines = [(0, 1000), (10, 2000), (20, 300), (20, 400), (30, 900)]
    body = "\n".join(runs.scrape_line(t, n, None, 4, 0, 0.1) for t, n in lines)
    found = series_of(text(tmp_path / "x.jsonl", body))
    assert [r.output_tokens for r in found.readings] == [1000, 300, 500]
    assert found.life_starts == (20,)
    assert found.readings[0].prompt_tokens is None


def test_a_server_that_did_not_answer_is_passed_over(tmp_path: Path) -> None:
    down = runs.scrape_line(10, None, None, None, 0, 0.0)
    body = "\n".join([runs.scrape_line(0, 5, 1, 2, 0, 0.1), down, "", runs.scrape_line(20, 25, 9, 2, 0, 0.1)])
    (reading,) = series_of(text(tmp_path / "x.jsonl", body)).readings
    assert (reading.span_s, reading.output_tokens, reading.prompt_tokens) == (20, 20, 8)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no stats line"),
        ("hello\n", "no stats line"),
        ("a,b,c\n1,2,3\n", "no stats line"),
        ("t_s,gen_tps,running,waiting\n", "no row"),
        ("t_s,gen_tps,running,waiting\nx,y,1,2\n", "no row"),
        ("bin_start_s,completions\n0,4\n", "at least two rows"),
        ("bin_start_s,completions\n", "at least two rows"),
        (runs.page(5, 5, None), "at least two"),
        (runs.scrape_line(0, 5, 1, 2, 0, 0.1), "at least two"),
        (runs.scrape_line(0, 5, 1, 2, 0, 0.1) + "\nnot json\n", "line 2"),
        (runs.scrape_line(0, 5, 1, 2, 0, 0.1) + "\n[1]\n", "line 2"),
        (runs.scrape_line(0, 5, 1, 2, 0, 0.1).replace('"t": 0', '"u": 0'), "line 1"),
    ],
)
def test_files_that_say_nothing(tmp_path: Path, content: str, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        read_series([text(tmp_path / "x", content)])
    assert caught.value.hint


def test_files_that_are_not_there(tmp_path: Path) -> None:
    there = text(tmp_path / "a1", runs.page(5, 5, None))
    for paths in ([tmp_path / "none"], [tmp_path], [there, tmp_path / "none2"]):
        with pytest.raises(InputError, match="cannot read"):
            read_series(paths)
    with pytest.raises(InputError, match="not a page"):
        read_series([there, text(tmp_path / "b2", "<html>no</html>")])


def test_a_last_line_that_is_being_written_is_left_out(tmp_path: Path) -> None:
    path = runs.write_scrapes(tmp_path / "load.jsonl", ROWS)
    path.write_text(path.read_text() + '{"schema": "autotune/scr')
    same_run(series_of(path))
