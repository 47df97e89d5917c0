"""What a start costs, and which starts share a compile cache."""

from __future__ import annotations

import pytest

from autotune.hub import shipped
from autotune.physics.gpus import parse_gpus
from autotune.physics.model_card import ModelCard
from autotune.physics.startup import compile_key, load_s, startup_s

NAME = "Qwen/Qwen3-32B"
CARD = ModelCard.from_config(shipped()[NAME], NAME)
H200 = parse_gpus("8xH200")


@pytest.mark.parametrize(
    "flags",
    [
        {"gpu_memory_utilization": 0.8},
        {"enable_prefix_caching": False},
        {"load_format": "dummy", "seed": 3},
        {"num_gpu_blocks_override": 400},
        {"max_num_seqs": 1024, "max_num_batched_tokens": 8192, "max_model_len": 40_960},  # vLLM's defaults here
        {"tensor_parallel_size": 1, "kv_cache_dtype": "auto"},
    ],
)
def test_the_same_code_is_found_again(flags: dict[str, object]) -> None:
    assert compile_key(CARD, H200, flags) == compile_key(CARD, H200, {})


@pytest.mark.parametrize(
    "flags",
    [
        {"max_num_seqs": 512},
        {"max_num_batched_tokens": 4096},
        {"max_model_len": 16_384},
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
        {"kv_cache_dtype": "fp8"},
        {"quantization": "fp8"},
        {"a_flag_of_tomorrow": 1},
    ],
)
def test_other_code_is_compiled_anew(flags: dict[str, object]) -> None:
    assert compile_key(CARD, H200, flags) != compile_key(CARD, H200, {})


def test_a_cold_start_takes_minutes_and_a_warm_one_less() -> None:
    cold, warm = (startup_s(CARD, H200, {}, warm=w) for w in (False, True))
    assert 130 < cold < 170
    assert 70 < warm < 100
    assert startup_s(CARD, H200, {"enforce_eager": True}, warm=False) < warm
    small = "Qwen/Qwen3-8B"
    assert startup_s(ModelCard.from_config(shipped()[small], small), H200, {}, warm=False) < cold


def test_weights_are_read_by_each_gpu_in_parallel() -> None:
    one, eight = (load_s(CARD, H200, {"tensor_parallel_size": tp}) for tp in (1, 8))
    assert one - load_s(CARD, H200, {"load_format": "dummy"}) == pytest.approx(65.5 / 2, rel=0.01)
    assert eight < one
    assert startup_s(CARD, H200, {"tensor_parallel_size": 8}, warm=True) > eight
