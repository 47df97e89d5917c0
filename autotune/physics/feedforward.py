"""Feed-forward layers read from a config: dense, mixture of experts, shared experts."""

from __future__ import annotations

import math

from autotune.physics.blocks import Weights
from autotune.physics.config_reader import ConfigReader

# Types with two matrices (up, down) instead of three (gate, up, down).
_UNGATED = (
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gptj",
    "opt",
    "bloom",
    "falcon",
    "mpt",
    "starcoder2",
    "codegen",
    "persimmon",
    "nemotron",
    "arcee",
    "apertus",
)
_UNGATED_EXACT = ("phi",)  # phi3 and phimoe are gated


def is_ungated(config: ConfigReader) -> bool:
    """Whether the feed-forward layer has no gate matrix."""
    if config.is_type("falcon_h1", "falcon_mamba"):
        return False
    return config.is_type(*_UNGATED) or config.model_type in _UNGATED_EXACT


def experts(config: ConfigReader) -> int:
    """Routed experts of a mixture layer; 0 for a dense model."""
    if config.get("enable_moe_block") is False:
        return 0
    return config.integer("experts", 0)


def feed_forward(config: ConfigReader, index: int, kind: str) -> list[Weights]:
    """Weights of the feed-forward part of layer number ``index``; empty where it has none."""
    if kind == "mlp" or (kind != "moe" and not _is_mixture(config, index)):
        return _dense(config, index)
    return _mixture(config)


def _is_mixture(config: ConfigReader, index: int) -> bool:
    if experts(config) < 2:
        return False
    types = config.list_("mlp_layer_types")
    if index < len(types):
        return str(types[index]) != "dense"
    if index in config.list_("mlp_only_layers") or index < config.integer("first_k_dense_replace", 0):
        return False
    listed = config.list_("moe_layers") or config.list_("moe_layers_enum")
    if listed:
        return index in listed
    every = config.get("moe_layer_freq")
    if isinstance(every, list):
        return bool(every[index])
    if config.get("expert_layer_period"):
        return index % config.integer("expert_layer_period") == config.integer("expert_layer_offset", 0)
    if config.get("moe_layer_interval"):  # Ernie: from a start index on, the last of each interval
        inside = config.integer("moe_layer_start_index", 0) <= index <= config.integer("moe_layer_end_index", 10**6)
        return inside and (index + 1) % config.integer("moe_layer_interval") == 0
    if config.get("interleave_moe_layer_step"):
        return (index + 1) % config.integer("interleave_moe_layer_step") == 0
    if config.get("num_dense_layers") is not None or config.get("n_dense_layers") is not None:
        return index >= config.integer("num_dense_layers", config.integer("n_dense_layers", 0))
    if isinstance(every, int) and every > 1:
        return index % every == 0
    return (index + 1) % config.integer("decoder_sparse_step", 1) == 0


def dense_size(config: ConfigReader, index: int) -> int:
    """Intermediate size of a dense feed-forward layer; 0 where the config has none."""
    sizes = config.get("intermediate")
    if isinstance(sizes, list):
        size = int(sizes[min(index, len(sizes) - 1)])
    else:
        size = config.integer("intermediate", 4 * config.integer("hidden") if is_ungated(config) else 0)
    size = config.integer("intermediate_size_mlp", size)  # Llama-4: its intermediate_size is an expert's
    if config.get("block_auto_adjust_ff_dim"):
        size = _lfm2_size(config, size)
    shared = config.integer("num_kv_shared_layers", 0)
    wide = config.get("use_double_wide_mlp") and shared and index >= config.integer("layers") - shared
    return 2 * size if wide else size


def _dense(config: ConfigReader, index: int) -> list[Weights]:
    size = dense_size(config, index) or config.integer("intermediate")
    matrices = 2 if is_ungated(config) else 3
    return [Weights(name="mlp.up_proj", parameters=config.integer("hidden") * size * matrices)]


def _lfm2_size(config: ConfigReader, size: int) -> int:
    multiple = config.integer("block_multiple_of", 256)
    scaled = int(float(config.get("block_ffn_dim_multiplier") or 1.0) * int(2 * size / 3))
    return multiple * math.ceil(scaled / multiple)


def expert_size(config: ConfigReader) -> int:
    """Intermediate size of one routed expert."""
    return config.integer("expert_intermediate", config.integer("intermediate", 0) or None)


def _mixture(config: ConfigReader) -> list[Weights]:
    hidden, count, size = config.integer("hidden"), experts(config), expert_size(config)
    chosen = min(count, config.integer("experts_per_token"))
    matrices = 2 if is_ungated(config) else 3
    outer = config.integer("moe_latent_size", hidden)  # Nemotron-3: experts work in a narrower space
    weights = [
        Weights(
            name="mlp.experts",
            parameters=count * matrices * outer * size,
            shard="experts",
            units=count,
            active=chosen / count,
        ),
        Weights(name="mlp.gate", parameters=hidden * count, shard="replicated", linear=False),
    ]
    if outer != hidden:
        weights.append(Weights(name="mlp.latent_proj", parameters=2 * hidden * outer))
    shared = _shared_size(config, size)
    if shared:
        weights.append(Weights(name="mlp.shared_experts", parameters=hidden * shared * matrices))
    if config.get("enable_moe_block"):  # Gemma-4: a dense layer beside the experts
        weights += _dense(config, 0)
    return weights


def _shared_size(config: ConfigReader, expert: int) -> int:
    if config.get("shared_intermediate") is not None:
        return config.integer("shared_intermediate") * max(1, config.integer("shared_experts", 1))
    if config.is_type("llama4"):
        return expert
    return expert * config.integer("shared_experts", 0)
