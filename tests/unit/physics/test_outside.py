"""Embeddings, output layer and towers."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.physics.config_reader import ConfigReader
from autotune.physics.outside import outside_weights

SIGLIP = {
    "model_type": "siglip_vision_model",
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "image_size": 896,
    "patch_size": 14,
}


def tower(**part: Any) -> int:
    text = {"hidden_size": 5376, "vocab_size": 10, "tie_word_embeddings": True}
    weights = outside_weights(ConfigReader({"text_config": text, "vision_config": part}))
    towers = [w for w in weights if w.name.endswith("_tower")]
    assert all(not w.linear and w.active == 0 for w in towers)
    return sum(w.parameters for w in towers)


def test_siglip_by_hand() -> None:
    blocks = 27 * (4 * 1152**2 + 2 * 1152 * 4304)
    assert tower(**SIGLIP) == blocks + 1152 * (3 * 14**2 + 64**2) + 1152 * 5376
    assert tower(**SIGLIP) == pytest.approx(417e6 + 6.2e6, rel=0.02)


def test_qwen_tower_merges_patches() -> None:
    part = {"embed_dim": 1280, "depth": 32, "mlp_ratio": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    size = tower(model_type="qwen2_vl", hidden_size=3584, patch_size=14, **part)
    assert size == pytest.approx(675e6, rel=0.03)  # published for Qwen2-VL


def test_gated_tower_without_positions() -> None:
    pixtral = {"model_type": "pixtral", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24}
    assert tower(**pixtral, patch_size=14, image_size=1540) == pytest.approx(405e6, rel=0.03)


def test_unreadable_towers_count_as_nothing() -> None:
    assert tower(hidden_size=10) == 0


def named(**config: Any) -> dict[str, int]:
    return {w.name: w.parameters for w in outside_weights(ConfigReader(config))}


def test_tables() -> None:
    assert named(hidden_size=64, vocab_size=100) == {"embed_tokens": 6400, "lm_head": 6400}
    assert named(hidden_size=64, vocab_size=100, tie_word_embeddings=True) == {"embed_tokens": 6400}
    opt = named(model_type="opt", hidden_size=64, vocab_size=100, word_embed_proj_dim=32, max_position_embeddings=50)
    assert opt == {"embed_tokens": 3200, "embed_positions": 3200}


def test_which_tables_a_token_multiplies_with() -> None:
    def active(tied: bool) -> list[float]:
        config = ConfigReader({"hidden_size": 8, "vocab_size": 8, "tie_word_embeddings": tied})
        return [w.active for w in outside_weights(config)]

    assert active(True) == [1.0]
    assert active(False) == [0.0, 1.0]


def test_embeddings_of_each_layer() -> None:
    gemma = named(
        model_type="gemma3n_text",
        hidden_size=64,
        vocab_size=100,
        num_hidden_layers=3,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=90,
    )
    assert gemma == {"embed_tokens": 6400, "embed_per_layer": 90 * 8 * 3, "per_layer_proj": 3 * 64 * 8 * 3}
