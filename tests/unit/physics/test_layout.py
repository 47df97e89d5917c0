"""Flags and vLLM's defaults."""

from __future__ import annotations

import pytest

from autotune.errors import InputError
from autotune.hub import shipped
from autotune.physics.gpus import GPUS
from autotune.physics.layout import Layout, read_layout, whole
from autotune.physics.model_card import ModelCard
from autotune.physics.rules import default_limits, rules_for

CARD = ModelCard.from_config(shipped()["Qwen/Qwen3-32B"], "Qwen/Qwen3-32B")


def layout(gpu: str = "H200", **flags: object) -> Layout:
    return read_layout(flags, CARD, GPUS[gpu], rules_for(None))


def test_defaults_of_a_large_card() -> None:
    plain = layout()
    assert (plain.tp, plain.pp, plain.dp, plain.gpus) == (1, 1, 1, 1)
    assert (plain.max_num_seqs, plain.max_num_batched_tokens) == (1024, 8192)
    assert plain.max_model_len == 40960
    assert plain.gpu_memory_utilization == 0.92
    assert (plain.block_size, plain.kv_cache_dtype, plain.eager) == (16, "auto", False)


def test_defaults_of_others() -> None:
    assert default_limits(GPUS["A100-80GB"]) == (256, 2048)
    assert default_limits(GPUS["L40S"]) == (256, 2048)
    assert default_limits(GPUS["B200"]) == (1024, 8192)
    processor = layout("CPU")
    assert (processor.block_size, processor.eager, processor.max_num_seqs) == (128, True, 256)


def test_throughput_mode_doubles_what_is_left_out() -> None:
    fast = layout(performance_mode="throughput")
    assert (fast.max_num_seqs, fast.max_num_batched_tokens) == (2048, 16384)
    assert layout(performance_mode="throughput", max_num_seqs=5).max_num_seqs == 5


def test_limits_bound_each_other() -> None:
    assert layout(max_num_seqs=2, max_model_len=100).max_num_batched_tokens == 200
    assert layout(max_num_batched_tokens=512).max_num_seqs == 512


def test_flags_are_read() -> None:
    full = layout(
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        data_parallel_size=3,
        enable_expert_parallel=True,
        decode_context_parallel_size=2,
        max_model_len="16k",
        gpu_memory_utilization=0.8,
        kv_cache_dtype="fp8",
        enforce_eager=True,
        num_gpu_blocks_override=40,
        kv_cache_memory_bytes="2G",
        block_size=32,
    )
    assert (full.engine_gpus, full.gpus) == (4, 12)
    assert (full.max_model_len, full.kv_cache_memory_bytes) == (16000, 2 * 2**30)
    assert full.expert_parallel
    assert full.eager
    assert full.num_gpu_blocks == 40


@pytest.mark.parametrize("value", ["auto", -1, "-1"])
def test_fitted_length(value: object) -> None:
    fitted = layout(max_model_len=value)
    assert fitted.fitted_len
    assert fitted.max_model_len == 40960


@pytest.mark.parametrize(
    ("value", "number"), [(7, 7), (7.0, 7), ("7", 7), ("32k", 32000), ("32K", 32768), ("1.5k", 1500), (None, 3)]
)
def test_whole_numbers(value: object, number: int) -> None:
    assert whole({"flag": value}, "flag", 3) == number


@pytest.mark.parametrize("value", [0, -3, True, 1.5, "many", [1]])
def test_what_is_no_whole_number(value: object) -> None:
    with pytest.raises(InputError, match="flag must be a whole number"):
        whole({"flag": value}, "flag", 3)


@pytest.mark.parametrize("value", [0, 1.2, "0.9", True])
def test_bad_shares(value: object) -> None:
    with pytest.raises(InputError, match="gpu_memory_utilization"):
        layout(gpu_memory_utilization=value)


def test_other_name_of_the_share() -> None:
    assert layout(device_memory_utilization=0.5).gpu_memory_utilization == 0.5
