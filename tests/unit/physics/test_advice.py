"""What is said when nothing fits."""

from __future__ import annotations

import pytest

from autotune.errors import InputError
from autotune.hub import shipped
from autotune.physics.advice import advise_when_nothing_fits, usable_share
from autotune.physics.gpus import GIB, parse_gpus
from autotune.physics.memory import fits
from autotune.physics.model_card import ModelCard


def card(name: str) -> ModelCard:
    return ModelCard.from_config(shipped()[name], name)


def test_too_large_for_one_card() -> None:
    # 131 GiB of weights: two cards of 79 GiB leave 4 GiB each, 28,000 tokens of 160 KiB; 131,072 take 20 GiB
    big = card("meta-llama/Llama-3.1-70B-Instruct")
    assert advise_when_nothing_fits(big, parse_gpus("H100"), 16384).least_gpus == 2
    advice = advise_when_nothing_fits(big, parse_gpus("H100"), 131072)
    assert advice.least_gpus == 4
    assert advice.longest_model_len == 0
    assert not advice.four_bit_weights  # 38 GiB, and 40 GiB of cache
    assert advise_when_nothing_fits(big, parse_gpus("H100"), 65536).four_bit_weights
    assert not advice.fp8_kv
    assert any("4 x H100" in line and "tensor_parallel_size 4" in line for line in advice.lines)
    assert fits(big, parse_gpus("4xH100"), {"tensor_parallel_size": 4, "max_model_len": 131072}).fits


def test_too_long_for_the_card() -> None:
    qwen = card("Qwen/Qwen3-32B")
    advice = advise_when_nothing_fits(qwen, parse_gpus("H100"), 40960)
    assert 0 < advice.longest_model_len < 40960
    assert advice.fp8_kv
    assert advice.fp8_weights
    assert advice.least_gpus == 2
    assert advice.lines[0].startswith("max_model_len up to")


def test_smaller_weights_that_serve_only_less_say_how_much() -> None:
    qwen = card("Qwen/Qwen3-32B")
    advice = advise_when_nothing_fits(qwen, parse_gpus("RTX 4090"), 16384)
    assert not advice.four_bit_weights
    line = next(line for line in advice.lines if line.startswith("a 4-bit checkpoint"))
    longest = int(line.rsplit(" ", 1)[1])
    assert 4096 < longest < 16384
    assert advise_when_nothing_fits(qwen, parse_gpus("RTX 4090"), longest).four_bit_weights
    assert not advise_when_nothing_fits(qwen, parse_gpus("RTX 4090"), longest + 16).four_bit_weights
    assert not any("fp8" in line for line in advice.lines)


def test_a_desktop_card_with_a_display() -> None:
    qwen = card("Qwen/Qwen3-8B")  # 15.3 GiB
    desktop = parse_gpus("RTX 4080").with_used(2 * GIB)
    advice = advise_when_nothing_fits(qwen, desktop, 8192)
    assert advice.gpu_memory_utilization == 0.87
    assert advice.longest_model_len == 0
    assert advice.fp8_weights  # 8.8 GiB
    assert advice.four_bit_weights
    assert any("0.87" in line and "2.0 GiB" in line for line in advice.lines)
    share = {"gpu_memory_utilization": advice.gpu_memory_utilization}
    assert fits(qwen, desktop, {"max_model_len": 8192, "quantization": "fp8", **share}).fits


def test_a_small_display_changes_nothing() -> None:
    advice = advise_when_nothing_fits(card("Qwen/Qwen3-32B"), parse_gpus("RTX 4090").with_used(GIB), 8192)
    assert advice.gpu_memory_utilization == 0.92
    assert not any("held by others" in line for line in advice.lines)


def test_flags_that_would_help() -> None:
    # the sampler of 256 sequences and the activations are what is missing
    qwen = card("Qwen/Qwen2.5-7B-Instruct")
    hardware = parse_gpus("RTX 4080")
    advice = advise_when_nothing_fits(qwen, hardware, 1024, {"max_num_batched_tokens": 8192, "tensor_parallel_size": 4})
    assert advice.least_gpus is not None
    assert not fits(qwen, hardware, {"max_model_len": 1024, "max_num_batched_tokens": 8192}).fits


def test_roomier_limits_are_named() -> None:
    qwen = card("Qwen/Qwen3-32B")
    flags = {"max_num_batched_tokens": 65536, "max_num_seqs": 1024}
    advice = advise_when_nothing_fits(qwen, parse_gpus("H100"), 8192, flags)
    assert any("max_num_seqs 8" in line for line in advice.lines)


def test_nothing_helps() -> None:
    advice = advise_when_nothing_fits(card("deepseek-ai/DeepSeek-V3"), parse_gpus("RTX 4090"), 8192)
    assert advice.least_gpus is None or advice.least_gpus > 32
    assert not advice.fp8_weights  # it is fp8 already
    assert advice.lines


def test_a_checkpoint_that_is_quantized_already_gets_no_quantization_advice() -> None:
    advice = advise_when_nothing_fits(card("openai/gpt-oss-120b"), parse_gpus("RTX 5090"), 8192)
    assert not advice.four_bit_weights
    assert advice.least_gpus == 4


def test_the_weights_alone_are_too_much() -> None:
    advice = advise_when_nothing_fits(card("Qwen/Qwen3-235B-A22B"), parse_gpus("T4"), 8192)
    if advice.least_gpus is None:
        assert "438 GiB" in advice.lines[0]
    else:
        assert advice.least_gpus > 16


def test_a_full_card() -> None:
    with pytest.raises(InputError, match="nothing of the memory"):
        advise_when_nothing_fits(card("Qwen/Qwen3-4B"), parse_gpus("RTX 4090").with_used(24 * GIB), 4096)


def test_usable_share() -> None:
    hardware = parse_gpus("RTX 4090")
    assert usable_share(hardware, 0.92) == 0.92
    assert usable_share(hardware.with_used(4 * GIB), 0.92) == 0.82
