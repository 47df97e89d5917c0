"""Kinds of layers, their heads and windows."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from autotune.errors import InputError
from autotune.physics.attention import attention, layer_kinds
from autotune.physics.config_reader import ConfigReader

BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}


def kinds(**config: Any) -> list[str]:
    return layer_kinds(ConfigReader({**BASE, **config}))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_hidden_layers": 4}, "full full full full"),
        (
            {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "linear_attention"]},
            "full sliding linear",
        ),
        ({"num_hidden_layers": 2, "layers_block_type": ["mamba", "attention"]}, "linear full"),
        ({"hybrid_override_pattern": "M*-E"}, "linear full mlp moe"),
        ({"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 4096}, "sliding sliding"),
        ({"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": None}, "full full"),
        ({"model_type": "gemma2", "num_hidden_layers": 4}, "sliding full sliding full"),
        (
            {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 512},
            "sliding sliding sliding sliding sliding full sliding",
        ),
        ({"model_type": "gpt_oss", "num_hidden_layers": 4, "sliding_window": 128}, "sliding full sliding full"),
        ({"model_type": "qwen2", "num_hidden_layers": 2, "sliding_window": 4096}, "full full"),
        (
            {
                "model_type": "qwen2",
                "num_hidden_layers": 3,
                "sliding_window": 4096,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            "full sliding sliding",
        ),
        ({"model_type": "phi3", "num_hidden_layers": 2, "sliding_window": 2047}, "sliding sliding"),
        (
            {
                "model_type": "exaone4",
                "num_hidden_layers": 4,
                "sliding_window": 64,
                "sliding_window_pattern": "LLG",
            },
            "sliding sliding full sliding",
        ),
        (
            {"model_type": "mimo_v2", "num_hidden_layers": 3, "hybrid_layer_pattern": [0, 1, 1], "sliding_window": 128},
            "full sliding sliding",
        ),
        (
            {"model_type": "llama4_text", "num_hidden_layers": 5, "attention_chunk_size": 128},
            "chunked chunked chunked full chunked",
        ),
        (
            {
                "model_type": "llama4_text",
                "num_hidden_layers": 2,
                "attention_chunk_size": 128,
                "no_rope_layers": [0, 1],
            },
            "full chunked",
        ),
        ({"model_type": "qwen3_next", "num_hidden_layers": 5}, "linear linear linear full linear"),
        ({"num_hidden_layers": 3, "full_attention_interval": 3}, "linear linear full"),
        (
            {"model_type": "jamba", "num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 1},
            "linear full linear linear full linear",
        ),
        ({"num_hidden_layers": 3, "attn_layer_indices": [1]}, "linear full linear"),
        ({"num_hidden_layers": 3, "full_attn_idxs": [2]}, "linear linear full"),
        ({"num_hidden_layers": 3, "attn_type_list": [0, 1, 0]}, "linear full linear"),
        ({"num_hidden_layers": 3, "linear_attn_config": {"full_attn_layers": [3]}}, "linear linear full"),
        ({"model_type": "falcon_h1", "num_hidden_layers": 2}, "both both"),
    ],
)
def test_kinds_of_layers(config: dict[str, Any], expected: str) -> None:
    assert kinds(**config) == expected.split()


def test_lists_that_do_not_fit() -> None:
    with pytest.raises(InputError, match="unknown kind: wavelet"):
        kinds(num_hidden_layers=1, layer_types=["wavelet"])
    with pytest.raises(InputError, match="names 1 layers"):
        kinds(num_hidden_layers=2, layer_types=["full_attention"])
    with pytest.raises(InputError, match="num_hidden_layers"):
        kinds()


def kv(config: dict[str, Any], kind: str = "full", index: int = 0) -> Any:
    return attention(ConfigReader({**BASE, "num_hidden_layers": 4, **config}), kind, index)


def test_a_window_beyond_the_context_is_none() -> None:
    assert kv({"sliding_window": 8192}, "sliding")[1][0].kind == "full"
    near = kv({"sliding_window": 1024}, "sliding")[1][0]
    assert (near.kind, near.window) == ("sliding", 1024)
    chunked = kv({"attention_chunk_size": 128}, "chunked")[1][0]
    assert (chunked.kind, chunked.window) == ("chunked", 128)
    assert kv({}, "chunked")[1][0].kind == "full"


def test_multi_query() -> None:
    assert kv({"multi_query": True})[1][0].heads == 1
    assert kv({"multi_query": True, "new_decoder_architecture": True})[1][0].heads == 2


def test_heads_that_differ_by_kind() -> None:
    gemma4 = {
        "head_dim": 8,
        "global_head_dim": 16,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "sliding_window": 64,
    }
    weights, caches = kv(gemma4)
    assert (caches[0].heads, caches[0].width) == (1, 32)
    assert {w.name: w.parameters for w in weights}["self_attn.k_proj"] == 64 * 16  # one matrix for both
    assert kv(gemma4, "sliding")[1][0].width == 16
    mimo = {"swa_num_key_value_heads": 4, "head_dim": 24, "v_head_dim": 16, "sliding_window": 64}
    assert (kv(mimo, "sliding")[1][0].heads, kv(mimo)[1][0].heads) == (4, 2)
    assert kv(mimo)[1][0].width == 40


def test_layers_that_read_the_cache_of_others() -> None:
    shared = {"num_kv_shared_layers": 2}
    assert len(kv({**shared, "model_type": "gemma3n_text"}, index=1)[1]) == 1
    weights, caches = kv({**shared, "model_type": "gemma3n_text"}, index=2)
    assert caches == ()
    assert len(weights) == 3
    assert len(kv({**shared, "model_type": "gemma4_text"}, index=3)[0]) == 2


def test_gated_attention_doubles_the_queries() -> None:
    plain = {w.name: w.parameters for w in kv({})[0]}
    gated = {w.name: w.parameters for w in kv({"model_type": "qwen3_next"})[0]}
    assert gated["self_attn.q_proj"] == 2 * plain["self_attn.q_proj"]


LATENT = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}


def test_latent_attention_without_a_query_rank() -> None:
    weights, caches = kv(LATENT)
    assert (caches[0].width, caches[0].latent) == (20, True)
    names = Counter(w.name for w in weights)
    assert "self_attn.q_a_proj" not in names
    assert {w.name for w in kv({**LATENT, "q_lora_rank": 12})[0]} - set(names) == {"self_attn.q_a_proj"}


def test_sparse_latent_attention_keeps_index_keys() -> None:
    weights, caches = kv({**LATENT, "index_topk": 2048, "index_n_heads": 4, "index_head_dim": 128})
    assert caches[0].extra_bytes == 132
    assert any(w.name == "self_attn.indexer" for w in weights)
    assert caches[0].bytes_per_token(2.0, 8) == 20 * 2 + 132


def test_minicpm_caches_expanded_heads() -> None:
    cache = kv({**LATENT, "model_type": "minicpm3"})[1][0]
    assert (cache.latent, cache.heads, cache.width) == (False, 8, 24)
