"""Probe and measure through the command line, on a fake server that is a real process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e.cli import FAKE, QUESTIONS, run

NGRAM = 'speculative_config={"method": "ngram"}'
COMMON = ("--model", "org/model-1b", "--vllm-command", FAKE, "--workload", str(QUESTIONS), "--max-tokens", "64")


def test_lengths_are_probed_once_and_found_again(tmp_path: Path) -> None:
    first = run("probe", *COMMON, "--study", "a", "--json", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    data = json.loads(first.stdout)
    assert data["schema"] == "autotune/probe/1"
    assert data["answers"] == 120  # all there are
    assert data["mean_low"] < data["mean_output_tokens"] < data["mean_high"] <= 64
    assert 0 < data["truncated_share"] <= data["truncated_share_high"]
    assert "probe: real answers to 120 questions" in first.stderr
    assert first.stderr.index("no longer than") < first.stderr.index("answers ended")  # its cost is said before
    study = tmp_path / "studies/a"
    lengths = json.loads((study / "lengths.json").read_text())
    assert lengths["schema"] == "autotune/lengths/1"
    assert lengths["fingerprint"]
    answers = [json.loads(line) for line in (study / "answers/probe.jsonl").read_text().splitlines()]
    assert len(answers) == 120
    assert all(a["text"] and a["output_tokens"] for a in answers)
    assert "answers" not in (study / ".gitignore").read_text()  # kept out of git: only what is named there is in

    again = run("probe", *COMMON, "--study", "b", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert "are known from studies/a/lengths.json" in again.stderr
    assert "ready after" not in again.stderr
    assert "120 answers" in again.stdout

    done = run("measure", *COMMON, "--concurrency", "8", "--window", "2s", "--json", cwd=tmp_path)
    assert done.returncode in (0, 3), done.stderr
    assert "are known from studies/a/lengths.json" in done.stderr
    assert "probe" not in done.stderr.replace("are known", "")
    load = json.loads(done.stdout)
    assert load["concurrency"] == 8
    assert load["truncated_share"] == pytest.approx(data["truncated_share"])

    fresh = run("probe", *COMMON, "--study", "b", "--again", "--probe-time", "30s", cwd=tmp_path)
    assert fresh.returncode == 0, fresh.stderr
    assert (tmp_path / "studies/b/lengths.json").exists()


def test_a_file_of_lengths_is_shown_and_forced(tmp_path: Path) -> None:
    (tmp_path / "l.txt").write_text("\n".join(str(20 + i % 40) for i in range(100)))
    shown = run("probe", *COMMON, "--lengths", "l.txt", "--json", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["mean_output_tokens"] == pytest.approx(37.5, rel=0.01)
    done = run(
        "measure", *COMMON, "--lengths", "l.txt", "--concurrency", "8", "--window", "2s", "--folder", "f", "--json",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode in (0, 3), done.stderr
    seen = json.loads(next((tmp_path / "f").glob("observation-00-8.json")).read_text())
    ended = {r["output_tokens"] for r in seen["requests"] if r["ended_s"] is not None}
    assert max(ended) <= 59
    assert "probe" not in done.stderr


def test_a_latency_that_is_too_long_makes_a_load_unstable(tmp_path: Path) -> None:
    arguments = ("measure", *COMMON, "--lengths", "hle-reasoning", "--concurrency", "4", "--window", "2s", "--json")
    done = run(*arguments, "--max-ttft", "1ms", "--max-tpot", "10s", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    load = json.loads(done.stdout)
    assert load["violations"]["ttft"] > 0
    assert load["violations"]["tpot"] < 0
    assert not load["stable"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("probe", "--probe-limit", "0"), "no probe"),
        (("probe", "--probe-limit", "20"), "at least 64"),
        (("probe", "--lengths", "none.txt"), "cannot read lengths"),
        (("probe", "--lengths", "hle-reasoning"), "is a law"),
        (("measure", "--set", "load_format=dummy", "--set", NGRAM), "accept no draft"),
    ],
)  # fmt: skip
def test_bad_input_is_exit_2(tmp_path: Path, args: tuple[str, ...], words: str) -> None:
    done = run(args[0], *COMMON, *args[1:], cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "hint:" in done.stderr


def test_a_probe_of_a_server_that_does_not_start_is_exit_3(tmp_path: Path) -> None:
    done = run("probe", *COMMON, cwd=tmp_path, env={"FAKE_VLLM_FAULT": "oom"})
    assert done.returncode == 3, done.stderr
    assert "no lengths were found" in done.stderr
