"""Which layers are mixtures, and what they weigh."""

from __future__ import annotations

from typing import Any

import pytest

from autotune.errors import InputError
from autotune.physics.config_reader import ConfigReader
from autotune.physics.feedforward import experts, feed_forward

MIXTURE: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 64,
    "intermediate_size": 256,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def mixtures(**config: Any) -> list[int]:
    reader = ConfigReader({**MIXTURE, **config})
    return [i for i in range(6) if any(w.shard == "experts" for w in feed_forward(reader, i, "full"))]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"num_experts": 0}, []),
        ({"num_experts": 1}, []),
        ({"enable_moe_block": False}, []),
        ({"first_k_dense_replace": 3}, [3, 4, 5]),
        ({"mlp_only_layers": [0, 4]}, [1, 2, 3, 5]),
        ({"decoder_sparse_step": 2}, [1, 3, 5]),
        ({"moe_layer_freq": 2}, [0, 2, 4]),
        ({"moe_layer_freq": [0, 1, 1, 0, 0, 1]}, [1, 2, 5]),
        ({"moe_layers": [2, 3]}, [2, 3]),
        ({"expert_layer_period": 3, "expert_layer_offset": 1}, [1, 4]),
        ({"moe_layer_interval": 2, "moe_layer_start_index": 2}, [3, 5]),
        ({"interleave_moe_layer_step": 2}, [1, 3, 5]),
        ({"num_dense_layers": 2}, [2, 3, 4, 5]),
        ({"mlp_layer_types": ["dense", "sparse", "dense", "sparse", "sparse", "sparse"]}, [1, 3, 4, 5]),
    ],
)
def test_which_layers_are_mixtures(config: dict[str, Any], expected: list[int]) -> None:
    assert mixtures(**config) == expected


def sizes(kind: str = "full", index: int = 0, **config: Any) -> dict[str, int]:
    weights = feed_forward(ConfigReader({**MIXTURE, **config}), index, kind)
    return {w.name: w.parameters for w in weights}


def test_weights_of_a_mixture() -> None:
    assert sizes() == {"mlp.experts": 8 * 3 * 64 * 32, "mlp.gate": 64 * 8}
    assert sizes(n_shared_experts=2)["mlp.shared_experts"] == 3 * 64 * 64
    assert sizes(shared_expert_intermediate_size=48)["mlp.shared_experts"] == 3 * 64 * 48
    assert "mlp.shared_experts" not in sizes(shared_intermediate_size=0)
    llama4 = sizes(model_type="llama4_text", moe_intermediate_size=None, intermediate_size=128)
    assert llama4["mlp.shared_experts"] == 3 * 64 * 128
    assert sizes(moe_latent_size=16)["mlp.experts"] == 8 * 3 * 16 * 32
    assert sizes(moe_latent_size=16)["mlp.latent_proj"] == 2 * 64 * 16
    assert sizes(enable_moe_block=True)["mlp.up_proj"] == 3 * 64 * 256


def test_active_share() -> None:
    weights = feed_forward(ConfigReader(MIXTURE), 0, "moe")
    assert weights[0].active == 0.25
    more = feed_forward(ConfigReader({**MIXTURE, "num_experts_per_tok": 100}), 0, "full")
    assert more[0].active == 1.0


def test_weights_of_dense_layers() -> None:
    assert sizes("mlp") == {"mlp.up_proj": 3 * 64 * 256}
    assert sizes("mlp", model_type="opt", intermediate_size=None, ffn_dim=100) == {"mlp.up_proj": 2 * 64 * 100}
    assert sizes("mlp", model_type="gpt2", intermediate_size=None) == {"mlp.up_proj": 2 * 64 * 256}
    assert sizes("mlp", model_type="phi") == {"mlp.up_proj": 2 * 64 * 256}
    assert sizes("mlp", model_type="phi3") == {"mlp.up_proj": 3 * 64 * 256}
    assert sizes("mlp", model_type="falcon_h1") == {"mlp.up_proj": 3 * 64 * 256}
    assert sizes("mlp", index=1, intermediate_size=[8, 16]) == {"mlp.up_proj": 3 * 64 * 16}
    assert sizes("mlp", intermediate_size_mlp=512) == {"mlp.up_proj": 3 * 64 * 512}
    # LFM2: two thirds, rounded up to a multiple of 256
    assert sizes("mlp", block_auto_adjust_ff_dim=True, intermediate_size=1000) == {"mlp.up_proj": 3 * 64 * 768}


def test_double_width_behind_shared_caches() -> None:
    wide = {"use_double_wide_mlp": True, "num_kv_shared_layers": 2}
    assert sizes("mlp", index=3, **wide) == {"mlp.up_proj": 3 * 64 * 256}
    assert sizes("mlp", index=4, **wide) == {"mlp.up_proj": 3 * 64 * 512}


def test_missing_sizes_are_named() -> None:
    with pytest.raises(InputError, match="intermediate_size"):
        sizes("mlp", intermediate_size=None)
    with pytest.raises(InputError, match="moe_intermediate_size"):
        sizes(moe_intermediate_size=None, intermediate_size=None)


def test_counts_of_experts() -> None:
    assert experts(ConfigReader({"n_routed_experts": 256})) == 256
    assert experts(ConfigReader({"hidden_size": 8})) == 0
