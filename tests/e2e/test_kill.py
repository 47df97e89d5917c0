"""kill -9 of the tuner: the next run ends what was left, loses nothing that was finished, and goes on."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.cli import FAKE, recipe, run, start
from tests.e2e.test_search_cli import ours


def finished(folder: Path) -> list[dict[str, object]]:
    file = folder / "studies/s/trials.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


@pytest.mark.parametrize("after_s", [pytest.param(4.0, id="once")])
def test_killed_once(tmp_path: Path, after_s: float) -> None:
    kill_and_resume(tmp_path, after_s)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_killed_at_random_points(tmp_path: Path, seed: int) -> None:
    kill_and_resume(tmp_path, random.Random(seed).uniform(0.5, 16.0))


def kill_and_resume(folder: Path, after_s: float) -> None:
    study = recipe(folder, trials=3)
    decoy = subprocess.Popen(
        [sys.executable, FAKE.split()[1], "serve", "org/model-1b", "--host", "127.0.0.1", "--port", "0"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        process = start("search", study, cwd=folder)
        time.sleep(after_s)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=30)
        before = finished(folder)
        again = run("search", study, cwd=folder)
        assert again.returncode == 0, again.stderr
        after = finished(folder)
        assert after[: len(before)] == before
        assert [trial["label"] for trial in after].count("vLLM defaults") == 1
        assert len(after) == 3
        assert not [line for line in ours(folder) if "fake_vllm" in line]
        assert decoy.poll() is None
    finally:
        decoy.kill()
        decoy.wait()
