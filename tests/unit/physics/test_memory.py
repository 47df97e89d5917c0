"""KV capacity against what real servers reported, and vLLM's own rules for what starts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import InputError
from autotune.hub import shipped
from autotune.physics.gpus import GIB, parse_gpus
from autotune.physics.memory import MemoryModel, fits
from autotune.physics.model_card import ModelCard
from autotune.records.settings import Settings

BASE = {"max_model_len": 16384, "max_num_seqs": 512}


def card(name: str) -> ModelCard:
    return ModelCard.from_config(shipped()[name], name)


QWEN = card("Qwen/Qwen3-32B")


@pytest.mark.parametrize(
    ("gpus", "flags", "measured"),
    [
        ("H200", {}, 269_312),
        ("H200", {"kv_cache_dtype": "fp8"}, 538_624),
        ("2xH200", {"tensor_parallel_size": 2}, 791_312),
        ("H200", {"kv_cache_dtype": "fp8", "quantization": "fp8"}, 775_872),
        ("2xH200", {"data_parallel_size": 2}, 2 * 269_312),
    ],
)
def test_measured_capacities_of_qwen3_32b(gpus: str, flags: Mapping[str, object], measured: int) -> None:
    # one and two H200, vLLM 0.22.1, dummy weights, 2026-11-30
    fit = fits(QWEN, parse_gpus(gpus), Settings({**BASE, **flags}))
    assert fit.fits
    assert fit.kv_capacity_tokens == pytest.approx(measured, rel=0.005)


def test_field_run_on_eight_80_gb_cards() -> None:
    # vLLM 0.10.0, TP 8, fp8 KV, otherwise defaults: 7.69 GiB of weights and 55.62 GiB of KV cache a GPU
    flags = {"tensor_parallel_size": 8, "kv_cache_dtype": "fp8", "max_model_len": 32768}
    fit = fits(QWEN, parse_gpus("8xH100"), flags, MemoryModel(version="0.10.0"))
    assert fit.kv_capacity_tokens == pytest.approx(3_644_816, rel=0.01)
    assert fit.breakdown.kv / GIB == pytest.approx(55.62, rel=0.01)
    # a version that is not known counts as today's, whose sampler needs less
    today = fits(QWEN, parse_gpus("8xH100"), {**flags, "gpu_memory_utilization": 0.9})
    assert today.kv_capacity_tokens == pytest.approx(3_644_816, rel=0.12)


@pytest.mark.parametrize(
    ("name", "gpus", "flags", "version", "kv_gib"),
    [
        # lines of public logs
        ("Qwen/Qwen3-235B-A22B-FP8", "4xH100", {"tensor_parallel_size": 4}, "0.9.2", 8.11),
        (
            "Qwen/Qwen2.5-7B-Instruct",
            "RTX 4090",
            {"max_model_len": 2048, "gpu_memory_utilization": 0.85},
            "0.24.0",
            4.45,
        ),
    ],
)
def test_capacities_from_public_logs(
    name: str, gpus: str, flags: Mapping[str, object], version: str, kv_gib: float
) -> None:
    fit = fits(card(name), parse_gpus(gpus), flags, MemoryModel(version=version))
    assert fit.breakdown.kv / GIB == pytest.approx(kv_gib, rel=0.08)


def test_capacity_is_summed_over_engines_and_rounded_to_blocks() -> None:
    one = fits(QWEN, parse_gpus("8xH200"), BASE)
    eight = fits(QWEN, parse_gpus("8xH200"), {**BASE, "data_parallel_size": 8})
    assert (one.engines, eight.engines) == (1, 8)
    assert eight.kv_capacity_tokens == 8 * one.kv_capacity_tokens
    assert one.kv_capacity_tokens % 16 == 0


def test_limits_set_by_hand() -> None:
    blocks = fits(QWEN, parse_gpus("H200"), {**BASE, "num_gpu_blocks_override": 2000})
    assert blocks.kv_capacity_tokens == 32000
    memory = fits(QWEN, parse_gpus("H200"), {**BASE, "kv_cache_memory_bytes": 16 * GIB})
    assert memory.kv_capacity_tokens == 16 * GIB // (256 * 1024)
    few = fits(QWEN, parse_gpus("H200"), {**BASE, "num_gpu_blocks_override": 100})
    assert not few.fits
    assert few.longest_model_len == 1600
    much = fits(QWEN, parse_gpus("H200"), {**BASE, "kv_cache_memory_bytes": 90 * GIB})
    assert "kv_cache_memory_bytes" in (much.reason or "")


@pytest.mark.parametrize(
    ("gpus", "flags", "words"),
    [
        ("H100", {}, "one request of max_model_len"),
        ("2xH200", {"tensor_parallel_size": 4}, "needs 4 GPUs, there are 2"),
        ("8xH200", {"tensor_parallel_size": 4, "data_parallel_size": 4}, "needs 16 GPUs"),
        ("8xH200", {"tensor_parallel_size": 3}, "64 attention heads"),
        ("8xH200", {"max_model_len": 50000}, "longer than the model's 40960"),
        ("8xH200", {"max_num_seqs": 512, "max_num_batched_tokens": 256}, "must be at least max_num_seqs"),
        ("8xH200", {"enable_expert_parallel": True}, "needs a model with experts"),
        ("RTX 4090", {}, "leave nothing"),
        ("80xH200", {"pipeline_parallel_size": 80}, "64 layers"),
        ("8xH200", {"tensor_parallel_size": 8, "decode_context_parallel_size": 2}, "above the 8 KV heads"),
    ],
)
def test_why_it_does_not_fit(gpus: str, flags: Mapping[str, object], words: str) -> None:
    length = {"max_model_len": 40960} if gpus == "H100" else {"max_model_len": 16384}
    fit = fits(QWEN, parse_gpus(gpus), {**length, **flags})
    assert not fit.fits
    assert fit.kv_capacity_tokens == 0
    assert fit.kv_capacity_at(1000) == 0
    assert words in (fit.reason or "")


def test_the_longest_length_is_where_it_stops_fitting() -> None:
    hardware = parse_gpus("H100")
    longest = fits(QWEN, hardware, {"max_model_len": 40960}).longest_model_len
    assert 0 < longest < 40960
    assert fits(QWEN, hardware, {"max_model_len": longest}).fits
    assert not fits(QWEN, hardware, {"max_model_len": longest + 16}).fits
    auto = fits(QWEN, hardware, {"max_model_len": "auto"})
    assert auto.fits
    assert auto.max_model_len == longest


def test_a_card_that_others_use() -> None:
    small = card("Qwen/Qwen3-4B")
    desktop = parse_gpus("RTX 4090").with_used(round(2.5 * GIB))
    fit = fits(small, desktop, {"max_model_len": 16384})
    assert not fit.fits
    assert "at most 0.89 would start" in (fit.reason or "")
    assert fits(small, desktop, {"max_model_len": 16384, "gpu_memory_utilization": 0.89}).fits


def test_window_layers_hold_their_window() -> None:
    gemma, hardware = card("google/gemma-3-27b-it"), parse_gpus("H200")
    fit = fits(gemma, hardware, {"max_model_len": 16384})
    # 7 groups of 10 layers: one sees everything (1024 blocks), six hold 1023 + 8192 tokens and one block more
    blocks = 1024 + 6 * (-(-(1023 + 8192) // 16) + 1)
    assert fit.kv_capacity_tokens == int(fit.blocks / blocks * 16384)
    # while decoding only the window is held: 1024 + 6 x 65 blocks
    assert fit.kv_capacity_at(16384) == int(fit.blocks / (1024 + 6 * 65) * 16384)
    # from 0.26 on two batches in flight are reserved for, which is the whole context here
    newer = fits(gemma, hardware, {"max_model_len": 16384}, MemoryModel(version="0.33.0"))
    assert newer.kv_capacity_tokens < 0.7 * fit.kv_capacity_tokens


def test_a_scaled_model_may_be_longer_than_its_config() -> None:
    yarn = {"hf_overrides": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "max_model_len": 131072}
    fit = fits(QWEN, parse_gpus("8xH200"), {**yarn, "tensor_parallel_size": 8})
    assert fit.fits
    assert fit.longest_model_len == 131072


def test_without_the_hybrid_manager_windows_cost_the_whole_context() -> None:
    gemma, hardware = card("google/gemma-3-27b-it"), parse_gpus("H200")
    fit = fits(gemma, hardware, {"max_model_len": 16384, "disable_hybrid_kv_cache_manager": True})
    assert fit.kv_capacity_tokens == pytest.approx(fit.breakdown.kv / (62 * 8192), rel=0.001)
    assert fit.kv_capacity_at(4096) == fit.kv_capacity_tokens


def test_latent_caches_are_copied_unless_context_parallel() -> None:
    deepseek, hardware = card("deepseek-ai/DeepSeek-V3"), parse_gpus("8xH200")
    flags = {"tensor_parallel_size": 8, "max_model_len": 32768}
    plain = fits(deepseek, hardware, flags)
    assert plain.breakdown.kv // 70272 == pytest.approx(plain.kv_capacity_tokens, abs=16)
    split = fits(deepseek, hardware, {**flags, "decode_context_parallel_size": 8})
    assert split.kv_capacity_tokens == pytest.approx(8 * plain.kv_capacity_tokens, rel=0.01)


def test_experts_of_data_parallel_engines_share_the_gpus() -> None:
    qwen = card("Qwen/Qwen3-235B-A22B")
    alone = fits(qwen, parse_gpus("8xH200"), {"max_model_len": 16384})
    assert not alone.fits
    spread = fits(qwen, parse_gpus("8xH200"), {"max_model_len": 16384, "data_parallel_size": 8})
    assert spread.fits
    assert spread.engines == 8


def test_a_launch_corrects_the_prediction() -> None:
    hardware, flags = parse_gpus("H200"), Settings(BASE)
    prior = MemoryModel()
    learnt = prior.observe(QWEN, hardware, flags, 250_000)
    assert prior.residuals == ()
    after = fits(QWEN, hardware, flags, learnt).kv_capacity_tokens
    assert after == pytest.approx(250_000, rel=0.005)
    assert after > 250_000  # shrunk towards the prior
    # the same bytes count for other flags of the card
    fp8 = {**BASE, "kv_cache_dtype": "fp8"}
    assert fits(QWEN, hardware, fp8, learnt).kv_capacity_tokens == pytest.approx(2 * after, rel=0.001)
    twice = learnt.observe(QWEN, hardware, flags, 250_000)
    assert abs(fits(QWEN, hardware, flags, twice).kv_capacity_tokens - 250_000) <= abs(after - 250_000)


def test_an_observation_of_several_engines_is_divided() -> None:
    hardware, flags = parse_gpus("2xH200"), {**BASE, "data_parallel_size": 2}
    learnt = MemoryModel().observe(QWEN, hardware, flags, 538_624)
    assert abs(learnt.residuals[0]) < 0.2 * GIB


def test_what_teaches_nothing() -> None:
    model, hardware = MemoryModel(), parse_gpus("H200")
    assert model.observe(QWEN, hardware, {**BASE, "num_gpu_blocks_override": 40}, 640) is model
    assert model.observe(QWEN, hardware, {**BASE, "kv_cache_memory_bytes": GIB}, 4096) is model
    assert model.observe(QWEN, hardware, {**BASE, "tensor_parallel_size": 8}, 4096) is model
    assert model.observe(QWEN, hardware, BASE, 0) is model
    assert model.correction_bytes == 0


def test_window_models_learn_too() -> None:
    gemma, hardware, flags = card("google/gemma-3-27b-it"), parse_gpus("H200"), {"max_model_len": 16384}
    seen = fits(gemma, hardware, flags).kv_capacity_tokens
    learnt = MemoryModel().observe(gemma, hardware, flags, seen)
    assert abs(learnt.residuals[0]) < 0.01 * GIB


def test_overhead_grows_with_what_is_profiled() -> None:
    hardware, model = parse_gpus("H200"), MemoryModel()
    base = model.overhead_bytes(QWEN, hardware, BASE)
    assert model.overhead_bytes(QWEN, hardware, {**BASE, "max_num_batched_tokens": 32768}) > base + 3 * GIB
    assert model.overhead_bytes(QWEN, hardware, {**BASE, "max_num_seqs": 4096}) > base + 5 * GIB
    assert model.overhead_bytes(QWEN, hardware, {**BASE, "enforce_eager": True}) < base
    mixture = card("Qwen/Qwen3-30B-A3B")
    assert model.overhead_bytes(mixture, hardware, BASE) > 0


def test_bad_flags() -> None:
    hardware = parse_gpus("H200")
    with pytest.raises(InputError, match="tensor_parallel_size"):
        fits(QWEN, hardware, {"tensor_parallel_size": "two"})
    with pytest.raises(InputError, match="gpu_memory_utilization"):
        fits(QWEN, hardware, {"gpu_memory_utilization": 1.5})


@settings(max_examples=40, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    share=st.floats(0.5, 0.95),
    seqs=st.integers(1, 1024),
    length=st.integers(1, 40960),
)
def test_more_memory_never_holds_less(tp: int, share: float, seqs: int, length: int) -> None:
    flags = {"tensor_parallel_size": tp, "max_num_seqs": seqs, "max_model_len": length}
    flags["max_num_batched_tokens"] = max(2048, seqs)
    hardware = parse_gpus("8xH200")
    small = fits(QWEN, hardware, {**flags, "gpu_memory_utilization": share})
    large = fits(QWEN, hardware, {**flags, "gpu_memory_utilization": min(0.99, share + 0.04)})
    assert large.kv_capacity_tokens >= small.kv_capacity_tokens
    if small.fits:
        assert small.kv_capacity_tokens >= small.max_model_len
        assert small.longest_model_len >= length
        parts = small.breakdown
        assert parts.weights + parts.overhead + parts.kv == parts.requested


def test_physics_loads_nothing_heavy() -> None:
    code = (
        "import sys, autotune.physics.advice\n"
        "print([m for m in ('scipy', 'pandas', 'numpy', 'huggingface_hub', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
