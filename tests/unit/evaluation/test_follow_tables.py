"""Tables of a run under way: columns by other names, several engines, ends alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.evaluation.follow_input import read_series
from autotune.evaluation.follow_series import RunSeries
from autotune.evaluation.follow_tables import Completions
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


@pytest.mark.parametrize(
    "header",
    [
        "time_s,generation_tps,num_requests_running,pending,kv_usage",
        "seconds;gen_tokens_per_s;running;waiting;kv_cache_usage",
        '"T_S"\t"Output_Tokens_per_s"\t"Running"\t"Waiting"\t"KV_percent"',
    ],
)
def test_columns_by_other_names(tmp_path: Path, header: str) -> None:
    separator = max(",;\t", key=header.count)
    percent = 100 if "percent" in header else 1
    lines = [(row.t_s, row.gen_tps, row.running, row.waiting, row.kv * percent) for row in ROWS]
    body = "\n".join(separator.join(map(str, line)) for line in lines)
    same_run(series_of(text(tmp_path / "x.csv", f"\ufeff# made by hand\n\n{header}\n{body}\n")))


def test_a_share_above_one_is_percent_whatever_its_column_is_called(tmp_path: Path) -> None:
    path = text(tmp_path / "x.csv", "t,gen_tps,running,waiting,kv_usage\n0,10,1,0,4.0\n10,10,1,0,50\n")
    assert [r.kv_usage for r in series_of(path).readings] == [0.04, 0.5]


def test_engines_at_one_time_are_added(tmp_path: Path) -> None:
    body = "".join(f"{t},100,8,1,{kv}\n" for t in (0, 10, 20) for kv in (10, 30))
    found = series_of(text(tmp_path / "x.csv", "t_s,gen_tps,running,waiting,kv_pct\n" + body))
    assert found.engines == 2
    assert {(r.output_tokens, r.running, r.waiting) for r in found.readings} == {(2000, 16, 2)}
    assert [found.readings[0].kv_usage, found.readings[0].kv_highest] == pytest.approx([0.2, 0.3])


def test_the_last_of_several_setups_counts(tmp_path: Path) -> None:
    body = "one,0,5,1,0\none,10,5,1,0\ntwo,0,9,3,0\ntwo,10,9,3,0\n"
    found = series_of(text(tmp_path / "x.csv", "setup,t_s,gen_tps,running,waiting\n" + body))
    assert [r.running for r in found.readings] == [3, 3]
    assert found.readings[0].kv_usage is None


def test_rows_without_numbers_are_passed_over(tmp_path: Path) -> None:
    body = "0,10,1,0,5\n,10,1,0,5\n10,nan,1,0,5\ninf,10,1,0,5\n20,10,one,0,\n30,10\n40,10,1,0,5,9,9\n"
    found = series_of(text(tmp_path / "x.csv", "t_s,gen_tps,running,waiting,kv_pct\n" + body))
    assert [r.t_s for r in found.readings] == [0, 20, 30, 40]
    assert found.readings[1].running == 0
    assert found.readings[1].kv_usage is None


def test_ends_are_read_where_the_table_has_them(tmp_path: Path) -> None:
    found = series_of(text(tmp_path / "x.csv", "t_s,gen_tps,running,waiting,completions\n0,5,2,0,0\n10,5,1,0,1\n"))
    assert [r.completions for r in found.readings] == [0, 1]


@pytest.mark.parametrize(
    ("content", "times", "counts"),
    [
        ("bin_start_s,completions\n0,0\n60,4\n120,6\n", (60, 120, 180), (0, 4, 6)),
        ("bin_start_s,cumulative\n0,0\n60,4\n120,10\n", (60, 120, 180), (0, 4, 6)),
        ("t_s;finished;cumulative\n60;4;4\n120;6;10\n", (60, 120), (4, 6)),
        ("t_s,completions,cumulative\n60,4,\nx,1,\n120,,10\n", (60, 120), (4, 6)),
    ],
)
def test_completions_alone(tmp_path: Path, content: str, times: tuple[float, ...], counts: tuple[float, ...]) -> None:
    found = read_series([text(tmp_path / "x.csv", content)])
    assert isinstance(found, Completions)
    assert (found.times_s, found.counts) == (times, counts)
