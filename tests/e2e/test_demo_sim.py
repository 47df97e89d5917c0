"""The demo on the built-in engine, as a stranger runs it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from autotune.search.folder import StudyFolder
from tests.e2e.cli import ROOT, run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo")
    (folder / "studies").mkdir()
    shutil.copy(ROOT / "studies/demo-sim.toml", folder / "studies")
    done = run("search", "studies/demo-sim.toml", cwd=folder, env={"http_proxy": "http://127.0.0.1:9"})
    (folder / "stdout.txt").write_text(done.stdout)
    (folder / "stderr.txt").write_text(done.stderr)
    assert done.returncode == 0, done.stderr
    return folder


def test_it_finds_a_better_setting_and_says_by_how_much(place: Path) -> None:
    out = (place / "stdout.txt").read_text()
    winner = StudyFolder(place / "studies/demo-sim").read_winner()
    gpus = winner.settings.integer("tensor_parallel_size", 1) * winner.settings.integer("data_parallel_size", 1)
    assert gpus == 8
    ratios = {gain.baseline: gain.ratio for gain in winner.gains}
    assert set(ratios) == {
        f"{label} at {n} in flight" for label in ("vLLM defaults", "rule of thumb: TP = GPUs") for n in (32, 100)
    }
    assert all(ratio is not None and ratio > 1.2 for ratio in ratios.values())
    assert out.count("against ") == 4
    assert str(winner.settings) in out


def test_it_forecasts_the_run(place: Path) -> None:
    winner = StudyFolder(place / "studies/demo-sim").read_winner()
    forecast = winner.forecast
    assert forecast is not None
    assert forecast.requests == 2158
    assert forecast.length_source == "hle-reasoning"
    assert 20 * 60 < forecast.low_s < forecast.makespan_s < forecast.high_s < 60 * 60
    assert forecast.truncated_share == pytest.approx(0.34, abs=0.03)
    assert "2,158 requests: " in (place / "stdout.txt").read_text()


def test_its_first_line_says_what_is_asked(place: Path) -> None:
    first = (place / "stderr.txt").read_text().splitlines()[0]
    assert "no questions but lengths of the law hle-reasoning, cut at max_tokens 14336" in first
    assert "2,158 requests" in first
    assert "20 trials" in first


def test_all_trials_are_kept_and_reported(place: Path) -> None:
    trials = StudyFolder(place / "studies/demo-sim").trials()
    assert len(trials) == 20
    assert [t.label for t in trials[:2]] == ["vLLM defaults", "rule of thumb: TP = GPUs"]
    assert all(load.failed_requests == 0 for trial in trials for load in trial.loads)
    assert all(trial.capacity is not None and trial.capacity.source == "model" for trial in trials)
    done = run("report", "demo-sim", "--write", "studies/demo-sim/report.md", cwd=place)
    assert done.returncode == 0
    report = (place / "studies/demo-sim/report.md").read_text()
    assert "forecast: 2,158 requests" in report
    assert report.count("\n| ") >= 21
    applied = run("apply", "best", cwd=place)
    assert applied.returncode == 0
    assert "vllm serve" in applied.stdout


def test_the_same_seed_finds_the_same(place: Path, tmp_path: Path) -> None:
    (tmp_path / "studies").mkdir()
    done = run("search", str(place / "studies/demo-sim.toml"), "--trials", "4", "--study", "again", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first = [json.loads(x) for x in (place / "studies/demo-sim/trials.jsonl").read_text().splitlines()[:4]]
    again = [json.loads(x) for x in (tmp_path / "studies/again/trials.jsonl").read_text().splitlines()]
    for one, two in zip(first, again, strict=True):
        assert {**one, "started_at": None} == {**two, "started_at": None}
