"""The main job through the command line, on a fake server that is a real process."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.cli import FAKE, QUESTIONS, recipe, run, start


def ours(folder: Path) -> list[str]:
    """Processes whose working directory is the test's folder, the command itself included."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and os.readlink(process / "cwd") == str(folder):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def test_search_apply_report_and_resume(tmp_path: Path) -> None:
    study = recipe(tmp_path)
    done = run("search", study, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    winner = json.loads((tmp_path / "studies/s/winner.json").read_text())
    assert winner["schema"] == "autotune/winner/1"
    assert winner["settings"]["max_num_seqs"] >= 16
    assert winner["client"]["concurrency"] == winner["measurement"]["concurrency"] > 8
    assert winner["gains"][0]["baseline"] == "vLLM defaults at 8 in flight"
    assert winner["gains"][0]["ratio"] > 1.2
    assert f"{winner['gains'][0]['ratio']:.2f}x" in done.stdout
    assert "\x1b" not in done.stderr
    assert "trial 1 of 4 (number 0): vLLM defaults" in done.stderr
    trials = [json.loads(line) for line in (tmp_path / "studies/s/trials.jsonl").read_text().splitlines()]
    assert len(trials) == 4
    assert all(load["failed_requests"] == 0 for trial in trials for load in trial["loads"])
    assert ours(tmp_path) == []

    again = run("search", study, cwd=tmp_path)
    assert again.returncode == 0
    assert "resuming: 4 finished trials are kept" in again.stderr
    assert len((tmp_path / "studies/s/trials.jsonl").read_text().splitlines()) == 4

    applied = run("apply", "best", cwd=tmp_path)
    assert applied.returncode == 0
    words = shlex.split(applied.stdout.replace("\\\n", " "), comments=True)
    assert words[:3] == [*shlex.split(FAKE)]
    assert words[3:] == ["org/model-1b", "--max-num-seqs", str(winner["settings"]["max_num_seqs"])]
    assert "requests in flight" in applied.stdout
    assert "studies/s" in applied.stderr
    assert run("apply", "best", "--to", "yaml", "--write", "w.yaml", cwd=tmp_path).returncode == 0
    assert "model: org/model-1b" in (tmp_path / "w.yaml").read_text()

    report = run("report", "s", "--json", cwd=tmp_path)
    assert [t["number"] for t in json.loads(report.stdout)["trials"]] == [0, 1, 2, 3]
    assert run("report", "--markdown", cwd=tmp_path).stdout.count("\n| ") == 5
    assert "vLLM defaults" in run("report", cwd=tmp_path).stdout


def test_apply_serve_is_the_server_in_the_foreground(tmp_path: Path) -> None:
    assert run("search", recipe(tmp_path, trials=2), cwd=tmp_path).returncode == 0
    server = start("apply", "best", "--serve", cwd=tmp_path)
    try:
        assert server.stdout is not None
        assert any("Application startup complete" in line for line in server.stdout)
    finally:
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=20)
    assert ours(tmp_path) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("moment", ["starting", "loading"])
def test_a_signal_leaves_nothing_and_the_next_run_goes_on(
    tmp_path: Path, number: signal.Signals, code: int, moment: str
) -> None:
    study = recipe(tmp_path, trials=2)
    slow = {"FAKE_VLLM_FAULT": "never_ready"} if moment == "starting" else {"FAKE_VLLM_SLOW": "20"}
    process = start("search", study, cwd=tmp_path, env=slow)
    assert process.stderr is not None
    begun = "ready after" if moment == "loading" else "(number 0)"
    err = ""
    while begun not in err:
        line = process.stderr.readline()
        assert line, err
        err += line
    time.sleep(1.5)
    process.send_signal(number)
    err += process.communicate(timeout=60)[1]
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert ours(tmp_path) == []
    again = run("search", study, cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    trials = [json.loads(line) for line in (tmp_path / "studies/s/trials.jsonl").read_text().splitlines()]
    assert [trial["label"] for trial in trials].count("vLLM defaults") == 1


def test_the_second_search_is_told_who_holds_the_study(tmp_path: Path) -> None:
    study = recipe(tmp_path)
    first = start("search", study, cwd=tmp_path, env={"FAKE_VLLM_FAULT": "never_ready"})
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "studies/s/attempts/0000/server.log").exists():
            assert time.monotonic() < deadline
            time.sleep(0.1)
        second = run("search", study, cwd=tmp_path)
        assert second.returncode == 5
        assert str(first.pid) in second.stderr
        assert "hint:" in second.stderr
    finally:
        first.send_signal(signal.SIGINT)
        first.communicate(timeout=60)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["search"], "--model is needed"),
        (["search", "none.toml"], "cannot read study file"),
        (["search", "--model", "m", "--workload", "mmlu"], "unknown workload 'mmlu'"),
        (["search", "--model", "m", "--workload", "none.jsonl", "--vllm-command", FAKE], "none.jsonl"),
        (["search", "--model", "m", "--workload", str(QUESTIONS), "--vllm-command", "no-such-vllm"], "no-such-vllm"),
        (["search", "--model", "m", "--vllm-command", FAKE], "hle"),
        (["search", "--model", "m", "--devices", "x"], "GPU indices"),
        (["search", "--model", "m", "--space", "max_num_seqs=3"], "space"),
        (["search", "--model", "m", "--set", "port=1", "--workload", str(QUESTIONS), "--vllm-command", FAKE], "port"),
        (["search", "--model", "m", "--baseline", "vllm serve m --port 'x"], "serve line"),
        (["measure"], "--model is needed"),
        (["measure", "--task", "none.json"], "cannot read task"),
        (["apply", "best"], "no study"),
        (["report", "nothing"], "no study"),
        (["apply", "worst"], "best"),
        (["nonsense"], "nonsense"),
    ],
)
def test_bad_input_is_exit_2_with_rule_value_and_hint(tmp_path: Path, args: list[str], words: str) -> None:
    done = run(*args, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_gated_data_set_is_answered_with_what_to_do(tmp_path: Path) -> None:
    done = run("search", "--model", "m", "--vllm-command", FAKE, cwd=tmp_path, env={"HF_TOKEN": "hf_secretsecret"})
    assert done.returncode == 2
    assert "--workload" in done.stderr.split("hint:")[1]
    assert "hf_secret" not in done.stderr
    assert "Traceback" not in done.stderr


def test_a_server_that_never_fits_is_exit_3_with_its_reason(tmp_path: Path) -> None:
    fault = {"FAKE_VLLM_FAULT": "dies_at_start:kv_too_small"}
    done = run("search", recipe(tmp_path, trials=2), cwd=tmp_path, env=fault)
    assert done.returncode == 3, done.stderr
    assert "kv_too_small" in done.stderr
    trials = [json.loads(line) for line in (tmp_path / "studies/s/trials.jsonl").read_text().splitlines()]
    assert {trial["state"] for trial in trials} == {"PRUNED"}
    assert {trial["failure"]["kind"] for trial in trials} == {"kv_too_small"}
    assert trials[0]["failure"]["log_path"].endswith("0000/server.log")


def test_measure_prints_one_object_and_runs_a_task_record(tmp_path: Path) -> None:
    options = ["--model", "m", "--workload", str(QUESTIONS), "--max-tokens", "32", "--vllm-command", FAKE]
    done = run("measure", *options, "--concurrency", "8", "--window", "2s", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["schema"] == "autotune/measure/1"
    assert data["concurrency"] == 8
    assert data["valid"] is True
    assert data["output_tokens_per_s"] > 0
    assert data["failure"] is None
    assert set(data) >= {
        "settings",
        "kv_usage_mean",
        "preemptions",
        "bottleneck",
        "startup_s",
        "window_s",
        "low",
        "high",
    }
    task = {
        "number": 7,
        "kind": "measure",
        "settings": {"max_num_seqs": 16},
        "engine": {"kind": "vllm", "model": "m", "vllm_command": FAKE},
        "workload": {"name": "jsonl", "path": str(QUESTIONS), "max_tokens": 32},
        "concurrency": {"values": [4]},
        "measure": {"window_s": 2.0, "window_limit_s": 3.0, "interval": 0.5, "drift_limit": 0.8},
    }
    (tmp_path / "task.json").write_text(json.dumps(task))
    done = run("measure", "--task", "task.json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["schema"], result["number"], result["state"]) == ("autotune/trial/1", 7, "COMPLETE")
    assert result["settings"] == {"max_num_seqs": 16}


def test_a_full_disk_is_named_and_loses_nothing(tmp_path: Path) -> None:
    small = tmp_path / "studies"
    small.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(small)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("this user cannot mount a small file system")
    try:
        done = run("search", recipe(tmp_path), cwd=tmp_path)
        assert done.returncode == 2, done.stderr
        assert "no space left" in done.stderr
        assert "Traceback" not in done.stderr
        kept = (small / "s/trials.jsonl").read_text() if (small / "s/trials.jsonl").exists() else ""
        assert all(json.loads(line)["schema"] == "autotune/trial/1" for line in kept.splitlines())
        subprocess.run(["mount", "-o", "remount,size=50m", str(small)], check=True)
        again = run("search", recipe(tmp_path), cwd=tmp_path)
        assert again.returncode == 0, again.stderr
        assert f"resuming: {len(kept.splitlines())}" in again.stderr or not kept
    finally:
        subprocess.run(["umount", "-l", str(small)], check=False)


def test_no_stdout_but_data_and_help_teaches(tmp_path: Path) -> None:
    for command in ("search", "apply", "measure", "report", "log", "scrape"):
        done = subprocess.run([sys.executable, "-m", "autotune", command, "--help"], capture_output=True, text=True)
        assert done.returncode == 0
        assert f"  autotune {command}" in done.stdout.split("Usage:")[1].split("\n", 1)[1]
