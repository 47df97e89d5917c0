"""The cost card."""

from __future__ import annotations

import json

import pytest

from autotune.physics.gpus import GIB
from autotune.planning.card import plan_data, plan_text, what_would_fit
from autotune.planning.ranking import rank_layouts
from autotune.records.settings import Settings
from tests.unit.planning.runs import LENGTH, physics, run

RANKED = rank_layouts(physics(), run(), LENGTH)


def test_the_data_has_exactly_the_fields_of_its_schema() -> None:
    data = json.loads(json.dumps(plan_data(physics(), RANKED, LENGTH), allow_nan=False))
    assert list(data) == ["schema", "model", "gpus", "candidates"]
    assert data["schema"] == "autotune/plan/1"
    assert set(data["model"]) == {"parameters", "weight_bytes", "kv_bytes_per_token"}
    assert data["model"]["parameters"] == pytest.approx(32_762_123_264, rel=1e-5)  # of the checkpoint on the hub
    assert data["model"]["weight_bytes"] == 2 * data["model"]["parameters"]
    assert data["model"]["kv_bytes_per_token"] == 262_144
    assert data["gpus"]["name"] == "H200"
    assert data["gpus"]["count"] == 8
    assert set(data["gpus"]) == {"name", "count", "memory_bytes", "bandwidth_bytes_per_s", "flops_per_s"}
    first = data["candidates"][0]
    assert list(first) == [
        "settings", "fits", "reason", "engines", "kv_capacity_tokens", "concurrency", "output_tokens_per_s",
        "makespan_s", "low_s", "high_s", "bottleneck",
    ]  # fmt: skip
    assert first["settings"] == {"data_parallel_size": 2, "max_model_len": 16_384, "tensor_parallel_size": 4}
    assert first["fits"] is True


def test_the_model_is_the_one_that_the_flags_load() -> None:
    flags = Settings(quantization="fp8", kv_cache_dtype="fp8", **LENGTH)
    model = plan_data(physics(), [], flags)["model"]
    assert model["parameters"] == pytest.approx(32_762_123_264, rel=1e-5)
    assert model["weight_bytes"] / GIB == pytest.approx(32.03, rel=0.01)  # measured
    assert model["kv_bytes_per_token"] == 131_072


def test_the_text_tells_the_same() -> None:
    text = plan_text(physics(), RANKED, LENGTH, run())
    lines = text.splitlines()
    assert "32.8 billion parameters" in lines[0]
    assert "256 KiB a token" in lines[0]
    assert lines[1].startswith("8xH200: each 139.8 GiB, 4.30 TB/s, 790 TFLOP/s")
    assert "2,158 requests" in lines[2]
    assert "hle-reasoning" in lines[2]
    assert "cut at 14,336" in lines[2]
    table = lines[4:15]
    assert table[0].split()[:2] == ["TP", "DP"]
    assert table[1].split()[:2] == ["4", "2"]
    assert f"{RANKED[0].kv_capacity_tokens:,}" in table[1]
    assert len({len(row) for row in table}) == 1
    assert "not measured here, physics only: t0_s" in text
    assert "does not fit" not in text


def test_what_does_not_fit_is_listed_below() -> None:
    knowledge = physics("deepseek-ai/DeepSeek-V3")
    ranked = rank_layouts(knowledge, run(), LENGTH)
    text = plan_text(knowledge, ranked, LENGTH, run())
    assert "\n\ndoes not fit:\n  TP " in text
    assert "leave nothing" in text
    nothing = rank_layouts(physics(gpus="RTX4090"), run(), LENGTH)
    assert "\n\ndoes not fit:\n  TP 1 x DP 1: weights" in plan_text(physics(gpus="RTX4090"), nothing, LENGTH, run())


def test_what_would_fit_is_about_memory_or_about_the_flags() -> None:
    small = physics(gpus="RTX4090")
    lines = what_would_fit(small, rank_layouts(small, run(), LENGTH), LENGTH)
    assert any("4 x RTX 4090" in line for line in lines)
    wrong = LENGTH.with_(enable_expert_parallel=True)
    assert what_would_fit(physics(), rank_layouts(physics(), run(), wrong), wrong) == [
        "expert parallelism needs a model with experts"
    ]
    three = LENGTH.with_(tensor_parallel_size=3)
    lines = what_would_fit(physics(), rank_layouts(physics(), run(), three), three)
    assert "64 attention heads are not divisible by tensor_parallel_size 3" in lines


def test_durations_are_in_a_readable_unit() -> None:
    knowledge = physics()
    for requests, unit in ((1, "s"), (400, "min"), (400_000, "h")):
        planned = run(requests=requests)
        flags = Settings(tensor_parallel_size=4, data_parallel_size=2, **LENGTH)
        ranked = rank_layouts(knowledge, planned, flags, draws=4)
        assert f" {unit} (" in plan_text(knowledge, ranked, flags, planned)
    bare = rank_layouts(knowledge, run(), LENGTH, draws=0)
    assert "(? to ?)" in plan_text(knowledge, bare, LENGTH, run())
