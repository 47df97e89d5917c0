"""Layers with a constant state."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.errors import InputError
from autotune.physics.config_reader import ConfigReader
from autotune.physics.model_card import ModelCard
from autotune.physics.states import state_layer

QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "vocab_size": 151936,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
}


def test_qwen3_next_by_hand() -> None:
    card = ModelCard.from_config(QWEN3_NEXT, "Qwen3-Next-80B-A3B")
    assert card.parameters == pytest.approx(79.67e9, rel=0.002)  # counted from the class in transformers
    # 12 of 48 layers have a cache: 2 heads x 256 x 2 x 2 bytes
    assert card.kv_bytes_per_token() == 12 * 2048
    # 36 states: convolution of (2 x 2048 + 4096) x 3 and 32 matrices of 128 x 128, two bytes each
    state = 36 * 2 * (8192 * 3 + 32 * 128 * 128)
    assert card.kv_bytes(1000) == 12 * 2048 * 1000 + state
    assert card.kv_bytes(1000, tp=2) == 12 * 1024 * 1000 + state / 2
    wide = ModelCard.from_config({**QWEN3_NEXT, "mamba_ssm_dtype": "float32"})
    assert wide.kv_bytes(1000) - card.kv_bytes(1000) == 36 * 2 * 32 * 128 * 128


def layer(**config: Any) -> tuple[int, float]:
    weights, (kept,) = state_layer(ConfigReader(config, "m"))
    assert kept.bytes_per_token(2.0) == 0
    return sum(w.parameters for w in weights), kept.bytes_per_request(5000, 2.0)


def test_mamba_2() -> None:
    # 4 heads of 16: inner 64, channels 64 + 2 x 8 = 80
    shape = {"hidden_size": 32, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
    parameters, kept = layer(**shape)
    assert parameters == 32 * (64 + 80 + 4) + 64 * 32 + 80 * 4
    assert kept == 2 * (80 * 3 + 4 * 16 * 8)
    expanded = layer(hidden_size=32, mamba_n_heads=4, mamba_d_head="auto", mamba_expand=2, mamba_d_state=8)
    assert expanded == (parameters, kept)
    named = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1, "conv_kernel": 4}
    nemotron = layer(model_type="nemotron_h", hidden_size=32, **named)
    assert nemotron == (parameters, 2 * 80 * 3 + 4 * 4 * 16 * 8)


def test_mamba_1() -> None:
    parameters, kept = layer(hidden_size=32, mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=2)
    assert parameters == 32 * 3 * 64 + 64 * (2 * 2 + 3 * 8 + 4)
    assert kept == 2 * (64 * 3 + 64 * 8)


def test_others() -> None:
    assert layer(hidden_size=32, conv_L_cache=3) == (4 * 32 * 32 + 32 * 3, 2 * 32 * 2)
    assert layer(model_type="minimax", hidden_size=64, num_attention_heads=4) == (5 * 64 * 64, 4 * 4 * 16 * 16)
    kimi = {"num_heads": 2, "head_dim": 16, "short_conv_kernel_size": 4}
    parameters, kept = layer(hidden_size=64, linear_attn_config=kimi)
    assert parameters == 4 * 64 * 32 + 2 * (64 * 16 + 16 * 32) + 64 * 2 + 3 * 32 * 4
    assert kept == 2 * 3 * 32 * 3 + 4 * 2 * 16 * 16
    renamed = layer(model_type="kimi_linear", hidden_size=64, linear_num_heads=2, linear_head_dim=16)
    assert renamed == (parameters, kept)


def test_a_missing_size_is_named() -> None:
    with pytest.raises(InputError, match="mamba_num_heads"):
        layer(hidden_size=32)
    with pytest.raises(InputError, match="ssm_state_size"):
        layer(hidden_size=32, mamba_num_heads=4)


def test_layers_beside_attention_and_single_layers() -> None:
    falcon = {
        "model_type": "falcon_h1",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "max_position_embeddings": 4096,
    }
    card = ModelCard.from_config(falcon)
    assert [kv.kind for kv in card.blocks[0].kv] == ["full", "state"]
    nemotron = {
        **{key: value for key, value in falcon.items() if key != "num_hidden_layers"},
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M*-",
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
    }
    hybrid = ModelCard.from_config(nemotron)
    assert [len(block.kv) for block in hybrid.blocks] == [1, 1, 0]
    assert [w.name for w in hybrid.blocks[2].weights] == ["norms", "mlp.up_proj"]
    assert hybrid.kv_layers == 2
