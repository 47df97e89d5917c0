"""Reading a config's keys."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.errors import InputError
from autotune.physics.config_reader import ConfigReader


def test_other_names_of_a_key() -> None:
    gpt2 = ConfigReader({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "n_positions": 1024})
    assert (gpt2.integer("layers"), gpt2.integer("hidden"), gpt2.integer("heads")) == (12, 768, 12)
    assert gpt2.max_model_len == 1024
    assert gpt2.tied


def test_nested_language_model_comes_first() -> None:
    config = {
        "model_type": "outer",
        "hidden_size": 1,
        "tie_word_embeddings": True,
        "text_config": {"model_type": "llama", "hidden_size": 4096},
    }
    reader = ConfigReader(config)
    assert reader.model_type == "llama"
    assert reader.integer("hidden") == 4096
    assert reader.tied
    deeper = ConfigReader({"thinker_config": {"text_config": {"hidden_size": 7}}})
    assert deeper.integer("hidden") == 7


def test_parts_of_dbrx() -> None:
    reader = ConfigReader({"d_model": 6144, "attn_config": {"kv_n_heads": 8}, "ffn_config": {"moe_num_experts": 16}})
    assert (reader.integer("kv_heads"), reader.integer("experts")) == (8, 16)


@pytest.mark.parametrize("value", ["many", 1.5, True, -1])
def test_what_is_no_whole_number(value: object) -> None:
    with pytest.raises(InputError, match="hidden_size must be a whole number"):
        ConfigReader({"hidden_size": value}).integer("hidden")


def test_null_is_absent_and_lists_give_their_largest() -> None:
    assert ConfigReader({"num_key_value_heads": None}).integer("kv_heads", 4) == 4
    assert ConfigReader({"intermediate_size": [100, 300]}).integer("intermediate") == 300
    assert ConfigReader({"layer_types": "word"}).list_("layer_types") == []


def test_name_of_a_model_without_one() -> None:
    assert ConfigReader({}).name == "the model"
    assert ConfigReader({"_name_or_path": "org/m"}).name == "org/m"


@pytest.mark.parametrize(
    ("config", "longest"),
    [
        ({"max_position_embeddings": 40960}, 40960),
        ({"max_position_embeddings": 40960, "seq_length": 8192}, 8192),
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
        ({}, 2048),
        (
            {
                "max_position_embeddings": 40960,
                "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        ({"max_position_embeddings": 131072, "rope_scaling": {"type": "yarn", "factor": 4.0}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 131072),
        ({"max_position_embeddings": 131072, "rope_scaling": {"type": "longrope", "long_factor": [1]}}, 131072),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 2.0}}, 8192),
        ({"max_position_embeddings": 4096, "rope_scaling": {"type": "dynamic", "factor": None}}, 4096),
        (
            {
                "model_type": "gemma3_text",
                "max_position_embeddings": 131072,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 4096,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 4.0},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            16384,
        ),
    ],
)
def test_longest_context(config: dict[str, Any], longest: int) -> None:
    assert ConfigReader(config).max_model_len == longest


@pytest.mark.parametrize(
    "config",
    [{"model_type": "zamba2"}, {"model_type": "nemotron-nas", "block_configs": [{}]}, {"compress_ratios": [4]}],
)
def test_what_is_not_modelled_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="cannot be predicted"):
        ConfigReader(config)


def test_keys_of_one_layer() -> None:
    reader = ConfigReader(
        {"head_dim": 256, "per_layer_config": {"05": {"head_dim": 512}}, "num_attention_heads_per_layer": [4, 8]}
    )
    assert reader.layer(5).integer("head_dim") == 512
    assert reader.layer(1).integer("heads") == 8
    assert ConfigReader({"head_dim": 256}).layer(3).integer("head_dim") == 256
