"""Model cards against arithmetic done by hand and against published parameter counts."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.errors import InputError
from autotune.hub import shipped
from autotune.physics.model_card import ModelCard

GIB = 1024**3

LLAMA_8B: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_scaling": {"factor": 8.0, "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "tie_word_embeddings": False,
}


def card(name: str) -> ModelCard:
    return ModelCard.from_config(shipped()[name], name)


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", 8.030e9, None),
        ("meta-llama/Llama-3.1-70B-Instruct", 70.55e9, None),
        ("Qwen/Qwen3-32B", 32.76e9, None),
        ("Qwen/Qwen3-4B", 4.02e9, None),
        ("Qwen/Qwen3-30B-A3B", 30.53e9, None),
        ("Qwen/Qwen3-235B-A22B", 235.1e9, 22e9),
        ("openai/gpt-oss-120b", 116.83e9, 5.13e9),
        ("openai/gpt-oss-20b", 20.91e9, 3.61e9),
        ("deepseek-ai/DeepSeek-V3", 671.0e9, 36.6e9),
        ("google/gemma-3-27b-it", 27.43e9, None),
        ("mistralai/Mistral-Small-24B-Instruct-2501", 23.57e9, None),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", 46.70e9, 12.9e9),
        ("Qwen/Qwen2.5-72B-Instruct", 72.7e9, None),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", 134.5e6, None),
    ],
)
def test_published_parameter_counts(name: str, total: float, active: float | None) -> None:
    assert card(name).parameters == pytest.approx(total, rel=0.01)
    if active is not None:
        assert card(name).active_parameters == pytest.approx(active, rel=0.025)


def test_llama_8b_by_hand() -> None:
    # a layer: q and o 4096x4096 each, k and v 4096x1024 each, three matrices 4096x14336, two norms of 4096
    layer = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096
    tables = 128256 * 4096
    llama = ModelCard.from_config(LLAMA_8B, "llama")
    assert llama.parameters == 32 * layer + 2 * tables
    assert llama.active_parameters == 32 * layer + tables
    assert llama.weight_bytes() == 2 * llama.parameters
    # KV: 32 layers x 8 heads x 128 x (key + value) x 2 bytes = 128 KiB
    assert llama.kv_bytes_per_token() == 32 * 8 * 128 * 2 * 2 == 131072
    assert llama.kv_bytes_per_token("fp8") == 65536
    assert llama.kv_bytes_per_token_per_gpu(4) == 32768
    assert llama.kv_bytes_per_token_per_gpu(16) == 131072 / 8  # no less than one head each
    assert llama.kv_bytes(1000) == 131072 * 1000
    assert llama.max_model_len == 131072  # llama3 scaling is already in the number
    assert llama.uniform
    assert llama.kv_layers == llama.layers == 32


def test_llama_70b_weights_on_eight_gpus() -> None:
    big = card("meta-llama/Llama-3.1-70B-Instruct")
    # 80 layers x 8 heads x 128 x 2 x 2 bytes = 320 KiB a token
    assert big.kv_bytes_per_token() == 80 * 8 * 128 * 2 * 2 == 327680
    assert big.weight_bytes() / GIB == pytest.approx(131.4, rel=0.001)
    assert big.weight_bytes_per_gpu(8) == pytest.approx(big.weight_bytes() / 8, rel=0.001)
    # at TP 16 the 8 KV heads are copied: k and v weigh 1/8 instead of 1/16 of 80 x 2 x 8192 x 1024 x 2 bytes
    copied = 80 * 2 * 8192 * 1024 * 2 * (1 / 8 - 1 / 16)
    norms = 80 * 2 * 8192 * 2 * (1 - 1 / 16)
    assert big.weight_bytes_per_gpu(16) == pytest.approx(big.weight_bytes() / 16 + copied + norms, rel=1e-6)


def test_qwen3_32b_matches_what_vllm_logged() -> None:
    qwen = card("Qwen/Qwen3-32B")
    assert qwen.weight_bytes_per_gpu(1) / GIB == pytest.approx(61.03, rel=0.001)  # H200, 0.22.1
    assert qwen.weight_bytes_per_gpu(8) / GIB == pytest.approx(7.6871, rel=0.01)  # 8 x 80 GB, 0.10.0
    assert qwen.quantized("fp8").weight_bytes_per_gpu(1) / GIB == pytest.approx(32.03, rel=0.005)  # online fp8
    assert qwen.kv_bytes_per_token() == 256 * 1024
    assert qwen.max_model_len == 40960


def test_qwen3_235b_by_hand() -> None:
    qwen = card("Qwen/Qwen3-235B-A22B")
    attention = 2 * 4096 * 64 * 128 + 2 * 4096 * 4 * 128
    experts = 128 * 3 * 4096 * 1536
    layer = attention + experts + 4096 * 128 + 2 * 4096
    assert qwen.parameters == 94 * layer + 2 * 151936 * 4096
    idle = 94 * experts * 120 // 128
    assert qwen.active_parameters == qwen.parameters - idle - 151936 * 4096
    assert qwen.kv_bytes_per_token() == 94 * 4 * 128 * 2 * 2 == 192512
    # 4 KV heads on 8 GPUs: each holds one, so a token takes a quarter and not an eighth
    assert qwen.kv_bytes_per_token_per_gpu(8) == 192512 / 4


def test_fp8_blocks_limit_tensor_parallelism() -> None:
    # 1536 over 8 GPUs is 192, no multiple of the 128-wide fp8 blocks; over 4 it is 384
    blocked = card("Qwen/Qwen3-235B-A22B-FP8")
    assert blocked.tp_choices(8) == (1, 2, 4)
    assert "192" in (blocked.tp_problem(8) or "")
    assert blocked.tp_problem(8, ep=True) is None
    assert "quantization block" in (blocked.tp_problem(4, dp=2) or "")
    assert card("Qwen/Qwen3-235B-A22B").tp_choices(8) == (1, 2, 4, 8)


def test_experts_are_spread_over_data_parallel_engines() -> None:
    qwen = card("Qwen/Qwen3-30B-A3B")
    experts = 48 * 128 * 3 * 2048 * 768 * 2
    rest = qwen.weight_bytes() - experts
    assert qwen.weight_bytes_per_gpu(1, dp=8) == pytest.approx(rest + experts / 8, rel=1e-9)
    assert qwen.weight_bytes_per_gpu(1, dp=8, ep=True) == qwen.weight_bytes_per_gpu(1, dp=8)
    # 128 experts on 3 x 5 GPUs: the fullest holds 9
    assert qwen.weight_bytes_per_gpu(1, dp=15, ep=True) == pytest.approx(rest + experts * 9 / 128, rel=1e-9)


def test_deepseek_v3_latent_cache_by_hand() -> None:
    deepseek = card("deepseek-ai/DeepSeek-V3")
    # one latent vector of 512 and one rotary key of 64 per token and layer, the same on each GPU
    assert deepseek.kv_bytes_per_token() == 61 * (512 + 64) * 2 == 70272
    assert deepseek.kv_bytes_per_token_per_gpu(8) == 70272
    assert deepseek.kv_bytes_per_token("fp8") == 35136
    assert deepseek.latent_attention
    assert deepseek.head_dim == 192
    attention = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    mixture = 257 * 3 * 7168 * 2048 + 7168 * 256
    dense = 3 * 7168 * 18432
    layers = 61 * (attention + 2 * 7168) + 58 * mixture + 3 * dense
    assert deepseek.parameters == layers + 2 * 129280 * 7168
    # fp8 in the checkpoint: one byte each, embedding, output layer, routers and norms two
    wide = 2 * 129280 * 7168 + 58 * 7168 * 256 + 61 * 2 * 7168
    assert deepseek.weight_bytes() == deepseek.parameters + wide
    assert deepseek.max_model_len == 163840  # yarn: 4096 x 40
    assert deepseek.tp_choices(16) == (1, 2, 4, 8, 16)


def test_gpt_oss_120b_window_and_mxfp4_by_hand() -> None:
    oss = card("openai/gpt-oss-120b")
    experts = 36 * 128 * 3 * 2880 * 2880
    assert oss.weight_bytes() == pytest.approx(2 * (oss.parameters - experts) + experts * 4.25 / 8, rel=1e-9)
    assert oss.weight_bytes() / 1e9 == pytest.approx(65.2, rel=0.01)  # the checkpoint's size
    assert oss.weight_bytes_per_gpu(1) / GIB == pytest.approx(64.38, rel=0.005)  # padded, as 0.14.1 logged
    # 18 of 36 layers see everything, 18 the last 128 tokens; 8 heads x 64 x 2 x 2 bytes = 2 KiB a layer
    assert oss.kv_bytes_per_token() == 18 * 2048
    assert oss.kv_bytes(100) == 36 * 2048 * 100
    assert oss.kv_bytes(10_000) == 18 * 2048 * 10_000 + 18 * 2048 * 128
    assert not oss.uniform
    assert oss.max_model_len == 131072


def test_gemma_3_27b_window_and_vision_by_hand() -> None:
    gemma = card("google/gemma-3-27b-it")
    # every sixth layer sees everything: 10 of 62; 16 heads x 128 x 2 x 2 bytes = 8 KiB a layer
    assert gemma.kv_bytes_per_token() == 10 * 8192
    assert gemma.kv_bytes(16384) == 8192 * (10 * 16384 + 52 * 1024)
    assert gemma.vocab_size == 262208  # not in the file
    assert gemma.max_model_len == 131072
    assert gemma.tied
    text = 62 * (2 * 5376 * 4096 + 2 * 5376 * 2048 + 3 * 5376 * 21504 + 2 * 5376) + 262208 * 5376
    assert gemma.parameters - text == pytest.approx(0.42e9, rel=0.05)  # SigLIP and its projector
    # online fp8 leaves embedding and vision in 16 bit
    matrices = text - 262208 * 5376 - 62 * 2 * 5376
    assert gemma.quantized("fp8").weight_bytes() == gemma.weight_bytes() - matrices


def test_pipeline_stages_hold_their_layers() -> None:
    llama = ModelCard.from_config(LLAMA_8B, "llama")
    table = 128256 * 4096 * 2
    layer = (llama.weight_bytes() - 2 * table) // 32
    assert llama.weight_bytes_per_gpu(1, pp=2) == 16 * layer + table
    # 32 over 3: the two left over go to the stages before the last
    assert [len(stage) for stage in llama.stages(3)] == [11, 11, 10]
    assert llama.weight_bytes_per_gpu(1, pp=3) == 11 * layer + table
    assert llama.kv_bytes_per_token_per_gpu(1, pp=2) == 131072 / 2


def test_tied_embedding_is_held_by_both_end_stages() -> None:
    tied = ModelCard.from_config({**LLAMA_8B, "tie_word_embeddings": True}, "tied")
    table = 128256 * 4096
    assert tied.parameters == ModelCard.from_config(LLAMA_8B).parameters - table
    layer = (tied.weight_bytes() - 2 * table) // 32
    assert tied.weight_bytes_per_gpu(1, pp=4) == 8 * layer + 2 * table


def test_head_dim_is_derived_or_given() -> None:
    assert ModelCard.from_config(LLAMA_8B).head_dim == 128
    assert ModelCard.from_config({**LLAMA_8B, "head_dim": 64}).kv_bytes_per_token() == 65536
    assert ModelCard.from_config({**LLAMA_8B, "num_key_value_heads": None}).kv_bytes_per_token() == 4 * 131072


@pytest.mark.parametrize("key", ["num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size"])
def test_a_missing_key_is_named(key: str) -> None:
    broken = {name: value for name, value in LLAMA_8B.items() if name != key}
    if key == "vocab_size":
        broken["model_type"] = "qwen2"  # llama has a default
    with pytest.raises(InputError, match=key):
        ModelCard.from_config(broken, "broken")


def test_a_missing_intermediate_size_is_named() -> None:
    with pytest.raises(InputError, match="intermediate_size"):
        ModelCard.from_config({**LLAMA_8B, "intermediate_size": None})
    with pytest.raises(InputError, match="num_experts_per_tok"):
        ModelCard.from_config({**LLAMA_8B, "num_local_experts": 8})


def test_dtype_and_online_quantization() -> None:
    llama = ModelCard.from_config(LLAMA_8B)
    assert llama.quantized(None) is llama
    assert llama.quantized("auto", "auto") is llama
    assert llama.quantized(None, "float32").weight_bytes() == 2 * llama.weight_bytes()
    assert llama.quantized(None, "float32").kv_bytes_per_token() == 2 * 131072
    # 4 bits and an fp32 scale for each 64: 0.5625 bytes; the two tables stay 16 bit
    matrices = llama.parameters - 2 * 128256 * 4096 - 32 * 2 * 4096
    assert llama.quantized("bitsandbytes").weight_bytes() == llama.weight_bytes() - (2 - 0.5625) * matrices
    with pytest.raises(InputError, match="checkpoint that was quantized"):
        llama.quantized("awq")
    with pytest.raises(InputError, match="dtype"):
        llama.quantized(None, "int7")
    already = card("deepseek-ai/DeepSeek-V3")
    assert already.quantized("fp8") is already


def test_wide_types_do_not_touch_what_the_checkpoint_quantized() -> None:
    oss = card("openai/gpt-oss-20b")
    wide = oss.quantized(None, "float32")
    experts = 24 * 32 * 3 * 2880 * 2880
    assert wide.weight_bytes() - oss.weight_bytes() == 2 * (oss.parameters - experts)


def test_unknown_kv_type() -> None:
    with pytest.raises(InputError, match="kv_cache_dtype 'int3'"):
        ModelCard.from_config(LLAMA_8B).kv_bytes_per_token("int3")


def test_checkpoint_with_kv_scales_decides_auto() -> None:
    scheme = {"num_bits": 8, "type": "float"}
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"}}}
    quantized = {"quant_method": "compressed-tensors", "config_groups": groups, "kv_cache_scheme": scheme}
    llama = ModelCard.from_config({**LLAMA_8B, "quantization_config": quantized})
    assert llama.kv_bytes_per_token() == 65536
    assert llama.kv_bytes_per_token("bfloat16") == 131072


def test_tensor_parallel_choices() -> None:
    assert card("HuggingFaceTB/SmolLM2-135M-Instruct").tp_choices(9) == (1, 3)  # 1536 is not divisible by 9
    assert card("Qwen/Qwen2.5-7B-Instruct").tp_choices(8) == (1, 2, 4)  # 28 heads
    uneven = ModelCard.from_config(
        {**LLAMA_8B, "num_attention_heads": 24, "num_key_value_heads": 6, "intermediate_size": 12288, "head_dim": 128}
    )
    assert uneven.tp_choices(12) == (1, 2, 3, 6, 12)
    assert "KV heads" in (uneven.tp_problem(4) or "")
    assert "intermediate size" in (ModelCard.from_config({**LLAMA_8B, "intermediate_size": 14337}).tp_problem(2) or "")


@settings(max_examples=30, deadline=None)
@given(
    layers=st.integers(1, 12),
    kv=st.sampled_from([1, 2, 4, 8]),
    hidden=st.sampled_from([256, 512, 1024]),
    tp=st.sampled_from([1, 2, 4, 8]),
)
def test_gpus_together_hold_at_least_the_whole(layers: int, kv: int, hidden: int, tp: int) -> None:
    shape = {
        **LLAMA_8B,
        "num_hidden_layers": layers,
        "num_key_value_heads": kv,
        "num_attention_heads": 8,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
    }
    model = ModelCard.from_config(shape)
    assert tp * model.weight_bytes_per_gpu(tp) >= model.weight_bytes() - tp
    assert tp * model.kv_bytes_per_token_per_gpu(tp) >= model.kv_bytes_per_token()
    assert model.kv_bytes(2048, tp=tp) == 2048 * model.kv_bytes_per_token_per_gpu(tp)
    assert model.weight_bytes_per_gpu(tp) <= model.weight_bytes()
