"""Runs the real command line in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FAKE = f"{sys.executable} {ROOT / 'tests/fakes/fake_vllm.py'} serve"
QUESTIONS = ROOT / "studies/smoke-questions.jsonl"

FAST = """
[measure]
window_s = 2.0
window_limit_s = 3.0
settle_limit_s = 20.0
interval = 0.5
drift_limit = 0.8
[concurrency]
start = 8
limit = 32
refine = 0
"""


def start(*args: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "autotune", *args],
        cwd=cwd,
        env={**os.environ, "AUTOTUNE_LOCKS": str(cwd / "locks"), "HF_HUB_OFFLINE": "1", **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(
    *args: str, cwd: Path, env: dict[str, str] | None = None, timeout: float = 100
) -> subprocess.CompletedProcess[str]:
    process = start(*args, cwd=cwd, env=env)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
        raise AssertionError(f"autotune {' '.join(args)} took more than {timeout} s: {err}") from None
    return subprocess.CompletedProcess(args, process.returncode, out, err)


def recipe(folder: Path, text: str = "", *, name: str = "s", trials: int = 4) -> str:
    """A study file for the fake server; ``text`` may add top-level keys."""
    path = folder / f"{name}.toml"
    path.write_text(
        f"""
model = "org/model-1b"
name = "{name}"
trials = {trials}
vllm_command = {FAKE!r}
{text}
[workload]
name = "jsonl"
path = {str(QUESTIONS)!r}
max_tokens = 64
[space]
max_num_seqs = [4, 16, 64]
[[baselines]]
label = "vLLM defaults"
concurrency = [8]
{FAST}
"""
    )
    return str(path)
