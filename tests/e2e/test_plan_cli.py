"""``autotune plan`` through the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.cli import ROOT, run

MODEL = "Qwen/Qwen3-32B"
PLAN = ("plan", "--model", MODEL)


def planned(cwd: Path, *args: str, code: int = 0) -> dict[str, Any]:
    done = run(*args, "--json", cwd=cwd)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def candidate(data: dict[str, Any], tp: int, dp: int = 1) -> dict[str, Any]:
    flags = {"tensor_parallel_size": tp, "data_parallel_size": dp}
    return next(c for c in data["candidates"] if flags.items() <= c["settings"].items())


# Capacities that servers logged: one and two H200s, vLLM 0.22.1, Qwen3-32B, 512 sequences of 16,384 tokens.
@pytest.mark.parametrize(
    ("gpus", "tp", "flags", "tokens"),
    [
        ("1xH200", 1, {}, 269_312),
        ("1xH200", 1, {"kv_cache_dtype": "fp8"}, 538_624),
        ("2xH200", 2, {}, 791_312),
        ("1xH200", 1, {"quantization": "fp8", "kv_cache_dtype": "fp8"}, 775_872),
    ],
)
def test_capacity_is_what_servers_said(tmp_path: Path, gpus: str, tp: int, flags: dict[str, str], tokens: int) -> None:
    words = [f"--set={name}={value}" for name, value in {"max_model_len": 16384, "max_num_seqs": 512, **flags}.items()]
    data = planned(tmp_path, *PLAN, "--gpus", gpus, *words)
    assert candidate(data, tp)["kv_capacity_tokens"] == pytest.approx(tokens, rel=0.05)
    assert data["gpus"]["count"] == int(gpus[0])


def test_the_card_of_a_node(tmp_path: Path) -> None:
    data = planned(tmp_path, *PLAN, "--gpus", "8xH200")
    assert data["schema"] == "autotune/plan/1"
    assert data["model"]["parameters"] == pytest.approx(32.76e9, rel=0.001)
    assert len(data["candidates"]) == 10
    makespans = [c["makespan_s"] for c in data["candidates"]]
    assert makespans == sorted(makespans)
    best = data["candidates"][0]
    assert best["settings"]["tensor_parallel_size"] * best["settings"]["data_parallel_size"] == 8
    assert best["low_s"] < best["makespan_s"] < best["high_s"]
    text = run(*PLAN, "--gpus", "8xH200", cwd=tmp_path)
    assert text.returncode == 0
    assert "first start: vllm serve Qwen/Qwen3-32B --data-parallel-size" in text.stdout
    assert "law" in text.stdout or "hle-reasoning" in text.stdout
    assert text.stderr == ""


def test_a_local_folder_needs_no_network(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    config = json.loads((ROOT / "autotune/hub_configs/Qwen--Qwen3-8B.json").read_text())["config"]
    (folder / "config.json").write_text(json.dumps(config))
    blocked = {"https_proxy": "http://127.0.0.1:9", "http_proxy": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = run("plan", "--model", str(folder), "--gpus", "RTX4090", "--json", cwd=tmp_path, env=blocked)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["parameters"] == pytest.approx(8.19e9, rel=0.01)


def test_when_nothing_fits_it_says_what_would(tmp_path: Path) -> None:
    done = run(*PLAN, "--gpus", "RTX4090", "--gpu-used", "1.5GiB", "--json", cwd=tmp_path)
    assert done.returncode == 3
    assert [c["fits"] for c in json.loads(done.stdout)["candidates"]] == [False]
    assert "Qwen/Qwen3-32B does not fit on 1xRTX 4090" in done.stderr
    assert "4 x RTX 4090" in done.stderr
    assert "4-bit" in done.stderr
    assert "max_model_len up to" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_display_is_left_its_memory(tmp_path: Path) -> None:
    small = ("plan", "--model", "Qwen/Qwen3-8B", "--gpus", "RTX4090", "--set", "max_model_len=8192")
    free, held = (planned(tmp_path, *small, *more) for more in ((), ("--gpu-used", "3GiB")))
    assert held["candidates"][0]["settings"]["gpu_memory_utilization"] == 0.87
    assert held["candidates"][0]["kv_capacity_tokens"] < free["candidates"][0]["kv_capacity_tokens"]
    bigger = planned(tmp_path, *small, "--gpu-memory", "48GB")
    assert bigger["gpus"]["memory_bytes"] == 48_000_000_000


def test_lengths_and_requests_move_the_makespan(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("\n".join(map(str, range(100, 900, 10))))
    base = (*PLAN, "--gpus", "8xH200")
    law = planned(tmp_path, *base)["candidates"][0]
    mean = planned(tmp_path, *base, "--mean-output", "500")["candidates"][0]
    file = planned(tmp_path, *base, "--lengths", str(lengths))["candidates"][0]
    few = planned(tmp_path, *base, "--requests", "200", "--max-tokens", "4096", "--workload", "synthetic")[
        "candidates"
    ][0]
    assert mean["makespan_s"] < 0.2 * law["makespan_s"]
    assert 0.2 * mean["makespan_s"] < file["makespan_s"] < mean["makespan_s"]  # the same mean, no long tail
    assert few["makespan_s"] < mean["makespan_s"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--gpus", "8xH999"), "unknown GPU"),
        (("--gpus", "8xH200", "--set", "tensor_parallel_size"), "flag=value"),
        (("--gpus", "8xH200", "--set", "port=8000"), "port is not a setting"),
        (("--gpus", "8xH200", "--set", "kv_cache_dtype=fp7"), "not known"),
        (("--gpus", "8xH200", "--workload", "trivia"), "unknown workload"),
        (("--gpus", "8xH200", "--lengths", "none.txt"), "cannot read lengths"),
        (("--gpus", "8xH200", "--gpu-used", "much"), "no size"),
        (("--gpus", "8xH200", "--mean-output", "5", "--lengths", "hle-reasoning"), "two answers"),
        ((), "--gpus"),
    ],
)
def test_bad_input_is_exit_2_and_names_the_value(tmp_path: Path, args: tuple[str, ...], says: str) -> None:
    done = run(*PLAN, *args, cwd=tmp_path)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unknown_model_is_exit_2(tmp_path: Path) -> None:
    done = run("plan", "--model", "Qwen/Qwen33-32B", "--gpus", "H100", cwd=tmp_path)
    assert done.returncode == 2
    assert "Qwen/Qwen3-32B" in done.stderr
    assert os.environ.get("HF_TOKEN") is None or os.environ["HF_TOKEN"] not in done.stderr


def test_nothing_heavy_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from autotune.cli.main import run\n"
        f"run(['plan', '--model', {MODEL!r}, '--gpus', '8xH200', '--json'])\n"
        "heavy = ('optuna', 'pandas', 'transformers', 'scipy', 'aiohttp')\n"
        "print([m for m in heavy if m in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "[]"
