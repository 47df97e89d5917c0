"""Quantized checkpoints: bytes per weight and what stays in 16 bit."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.errors import InputError
from autotune.physics.blocks import Weights
from autotune.physics.config_reader import ConfigReader
from autotune.physics.model_card import ModelCard
from autotune.physics.quantization import Quantization, checkpoint_quantization, online_quantization

GIB = 1024**3
QWEN_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


def read(part: dict[str, Any]) -> Quantization | None:
    return checkpoint_quantization(ConfigReader({"model_type": "llama", "quantization_config": part}, "m"))


@pytest.mark.parametrize(
    ("part", "each"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1.0),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 0.5 + 2.5 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, 1 + 3 / 32),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, 0.5),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 0.5 + 2.5 / 64),
        ({"quant_method": "hqq", "weight_config": {"nbits": 4, "group_size": 64}}, 0.5 + 2.5 / 64),
        ({"quant_method": "mxfp4"}, 0.53125),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 0.5625),
        ({"quant_algo": "FP8", "producer": {"name": "modelopt"}}, 1.0),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5625),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1.0),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}},
            },
            0.5 + 2 / 128,
        ),
        (
            {
                "quant_method": "compressed_tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}},
            },
            0.5 + 1 / 16,
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "g": {
                        "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
                    }
                },
            },
            1.0,
        ),
    ],
)
def test_bytes_of_a_quantized_weight(part: dict[str, Any], each: float) -> None:
    found = read(part)
    assert found is not None
    assert found.bytes_each == pytest.approx(each)


def test_no_quantization() -> None:
    assert read({}) is None
    assert checkpoint_quantization(ConfigReader({"model_type": "llama"})) is None


def test_quantization_of_a_nested_text_config() -> None:
    nested = {"text_config": {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}}
    found = checkpoint_quantization(ConfigReader(nested))
    assert found is not None
    assert found.method == "fp8"


def test_what_cannot_be_read_is_named() -> None:
    with pytest.raises(InputError, match="quant_method 'magic'"):
        read({"quant_method": "magic"})
    with pytest.raises(InputError, match="num_bits"):
        read({"quant_method": "compressed-tensors", "config_groups": {}})


def test_kv_scales_of_modelopt() -> None:
    found = read({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"})
    assert found is not None
    assert found.kv_bytes == 1.0


@pytest.mark.parametrize(
    ("kept", "name", "stays"),
    [
        (["lm_head"], "self_attn.q_proj", False),
        (["model.layers.3.self_attn.q_proj"], "self_attn.q_proj", True),
        (["model.layers.4.self_attn.q_proj"], "self_attn.q_proj", False),
        (["model.layers.3.self_attn"], "self_attn.q_proj", True),
        (["model.language_model.layers.3.self_attn"], "self_attn.o_proj", True),
        (["q_proj"], "self_attn.q_proj", True),
        (["self_attn"], "self_attn.o_proj", True),
        (["model.layers.*.self_attn"], "self_attn.k_proj", True),
        (["model.layers.*.self_attn"], "mlp.experts", False),
        (["re:.*self_attn.*"], "self_attn.q_proj", True),
        (["re:.*mlp.gate$"], "mlp.experts", False),
        (["re:.*shared_expert.*"], "mlp.shared_experts", True),
        (["model.layers.3.mlp.shared_expert"], "mlp.shared_experts", True),
        (["model.layers.3.linear_attn"], "mixer.in_proj", True),
        (["re:("], "self_attn.q_proj", False),
    ],
)
def test_modules_that_stay_in_16_bit(kept: list[str], name: str, stays: bool) -> None:
    quantization = read({"quant_method": "fp8", "modules_to_not_convert": kept})
    assert quantization is not None
    stored = quantization.apply(Weights(name=name, parameters=1000), 3, 4096)
    assert (stored.bytes_each == 2.0) is stays


def test_norms_and_tables_are_never_quantized() -> None:
    fp8 = online_quantization("fp8")
    table = Weights(name="embed_tokens", parameters=10, linear=False)
    assert fp8.apply(table, None, 4096) is table


def test_only_experts() -> None:
    mxfp4 = read({"quant_method": "mxfp4"})
    assert mxfp4 is not None
    experts = mxfp4.apply(Weights(name="mlp.experts", parameters=100, shard="experts", units=4), 0, 2880)
    assert experts.bytes == pytest.approx(53.125)
    assert experts.padded == pytest.approx(3072 / 2880)
    assert experts.bytes_per_gpu(2) == pytest.approx(53.125 / 2 * 3072 / 2880)
    assert mxfp4.apply(Weights(name="self_attn.q_proj", parameters=100), 0, 2880).bytes == 200
    assert online_quantization("experts_int8").only_experts


def test_a_4_bit_mixture_weighs_what_vllm_logged() -> None:
    # Qwen3-30B-A3B, 4 bits in groups of 128: 15.61 GiB in a 0.10.0 log
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128}
    card = ModelCard.from_config({**QWEN_30B, "quantization_config": awq})
    assert card.weight_bytes() / GIB == pytest.approx(15.61, rel=0.005)
    # 768 over 8 GPUs is 96: less than a group
    assert "quantization block of 128" in (card.tp_problem(8) or "")


def test_long_lists_of_kept_modules_are_quick_to_read() -> None:
    kept = [f"model.layers.{i}.mlp.experts.{e}.up_proj" for i in range(24) for e in range(128)]
    part = {"quant_method": "fp8", "modules_to_not_convert": kept}
    card = ModelCard.from_config({**QWEN_30B, "quantization_config": part})
    experts = 128 * 3 * 2048 * 768
    full = ModelCard.from_config({**QWEN_30B, "quantization_config": {"quant_method": "fp8"}})
    assert card.weight_bytes() - full.weight_bytes() == 24 * experts  # expert 0 speaks for its layer
