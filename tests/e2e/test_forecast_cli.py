"""``autotune forecast`` through the command line, and against whole runs from the field where they are there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import autotune
from autotune.cli.main import run
from tests.unit.evaluation import follow_runs as runs

FIELD = Path(os.environ.get("AUTOTUNE_FIELD", Path(autotune.__file__).parents[2] / "shared" / "field")) / "timelines"
PLAYED = runs.played(160)
ARGS = ("--requests", "160", "--max-tokens", "4000")
field = pytest.mark.skipif(not FIELD.is_dir(), reason="no field material here")


def forecast(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert run(["forecast", *args, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["schema"] == "autotune/follow/1"
    assert found["low_s"] <= found["forecast_s"] <= found["high_s"]
    assert found["level"] == 0.95
    return found


def timeline(letter: str) -> str:
    return str(next(FIELD.glob(f"{letter}-*.csv")))


def half_width(found: dict[str, Any]) -> float:
    return float((found["high_s"] - found["low_s"]) / 2 / found["forecast_s"])


def test_text_and_json_say_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(runs.write_log(tmp_path / "server.log", PLAYED.rows))
    found = forecast(capsys, path, *ARGS, "--at", "50")
    assert not found["done"]
    assert found["elapsed_s"] == 50
    assert found["low_s"] <= PLAYED.end_s <= found["high_s"]
    assert run(["forecast", path, *ARGS, "--at", "50s"]) == 0
    text = capsys.readouterr().out
    for part in ("total", "elapsed   50 s", "95% between", "observed+prior", found["limits"][0]):
        assert part in text


def test_a_run_that_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(runs.write_csv(tmp_path / "a.csv", PLAYED.rows))
    assert forecast(capsys, path, *ARGS)["done"]
    assert run(["forecast", path, *ARGS]) == 0
    assert capsys.readouterr().out.startswith("done      in ")


def test_a_full_cache_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tight = runs.played(200, capacity=1.5e5)
    path = str(runs.write_csv(tmp_path / "a.csv", tight.rows))
    assert run(["forecast", path, "--requests", "200", "--max-tokens", "4000", "--at", "90"]) == 0
    assert f"was full at {tight.full_at_s:.0f} s" in capsys.readouterr().out


def test_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pages = [str(path) for path in runs.write_pages(tmp_path, PLAYED.rows)[:6]]
    assert forecast(capsys, *pages, *ARGS)["elapsed_s"] == 50


def test_lengths_from_a_file_and_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(runs.write_scrapes(tmp_path / "load.jsonl", PLAYED.rows))
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(map(str, PLAYED.lengths)))
    found = forecast(capsys, path, *ARGS, "--at", "50", "--lengths", str(lengths))
    assert found["length_source"] == str(lengths)
    assert found["low_s"] <= PLAYED.end_s <= found["high_s"]
    shipped = forecast(capsys, path, *ARGS, "--at", "50", "--lengths", "hle-reasoning")
    assert shipped["length_source"] == "hle-reasoning"


def test_lengths_do_not_help_ends_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "client.csv"
    path.write_text("bin_start_s,completions\n0,0\n60,10\n120,12\n180,9\n")
    assert run(["forecast", str(path), *ARGS, "--lengths", "hle-reasoning", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["length_source"] == "completions"
    assert "left out" in err
    assert run(["forecast", str(path), "--requests", "20000", "--max-tokens", "4000"]) == 0
    assert " h and " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["none.log", *ARGS], "cannot read"),
        (["run.csv", "--requests", "20", "--max-tokens", "4000"], "more than the 20"),
        (["run.csv", *ARGS, "--at", "1"], "no load in the first 1 s"),
        (["run.csv", *ARGS, "--at", "soon"], "no duration"),
        (["run.csv", *ARGS, "--lengths", "none.json"], "cannot read lengths"),
        (["run.csv", "--requests", "0", "--max-tokens", "4000"], "--requests"),
        (["run.csv", "--requests", "20"], "--max-tokens"),
        ([*ARGS], "FILE"),
    ],
)
def test_bad_input_exits_with_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], args: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    runs.write_csv(tmp_path / "run.csv", PLAYED.rows)
    assert run(["forecast", *args]) == 2
    assert says in capsys.readouterr().err


def test_help_has_a_line_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["forecast", "--help"]) == 0
    text = capsys.readouterr().out
    assert "autotune forecast server.log --requests 1000 --max-tokens 16384" in text
    assert "t_s" in text


@field
def test_a_thousand_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    args = (timeline("a"), "--requests", "1000", "--max-tokens", "16384")
    found = forecast(capsys, *args, "--at", "300")
    assert found["forecast_s"] == pytest.approx(1462, rel=0.15)
    assert found["low_s"] <= 1462 <= found["high_s"]
    assert found["kv_full_at_s"] == pytest.approx(410, rel=0.1)
    over = forecast(capsys, *args)
    assert over["done"]
    assert over["forecast_s"] == pytest.approx(1462, rel=0.01)


@field
def test_thirty_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    found = forecast(capsys, timeline("c"), "--requests", "30", "--max-tokens", "32768", "--at", "150")
    assert found["low_s"] <= 531 <= found["high_s"]
    assert found["forecast_s"] == pytest.approx(531, rel=0.25)


@field
@pytest.mark.parametrize("at_s", ["3600", "7200"])
def test_ends_alone_are_wide_and_say_why(capsys: pytest.CaptureFixture[str], at_s: str) -> None:
    args = (timeline("d"), "--requests", "4428", "--max-tokens", "16384")
    early, now = forecast(capsys, *args, "--at", at_s), forecast(capsys, *args)
    assert not now["done"]
    assert early["low_s"] <= now["forecast_s"] <= early["high_s"]
    assert half_width(early) > 0.2 > half_width(now)
    assert early["length_source"] == "completions"
    assert any("only the times of ends" in limit for limit in early["limits"])
