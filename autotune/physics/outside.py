"""Weights outside the layers: embeddings, output layer, vision and audio towers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autotune.physics.blocks import Weights
from autotune.physics.config_reader import ConfigReader

_TOWERS = ("vision_config", "audio_config")
# Types that begin with a table of learned positions.
_LEARNED_POSITIONS = ("gpt2", "gpt_bigcode", "opt", "gpt_neo", "codegen")


def outside_weights(config: ConfigReader) -> list[Weights]:
    """All of them; ``embed_tokens`` and ``lm_head`` by these names, one ``lm_head`` only where it is not tied."""
    hidden, vocab, layers = config.integer("hidden"), config.integer("vocab"), config.integer("layers", 0)
    width = config.integer("word_embed_proj_dim", hidden)  # OPT-350m embeds in a narrower space
    tied = config.tied
    weights = [_table("embed_tokens", vocab * width, active=1.0 if tied else 0.0)]
    if not tied:
        weights.append(_table("lm_head", vocab * width, active=1.0))
    if config.is_type(*_LEARNED_POSITIONS):
        weights.append(_table("embed_positions", config.max_model_len * hidden))
    narrow = config.integer("hidden_size_per_layer_input", 0)
    if narrow:  # Gemma-3n and Gemma-4 E: one more embedding for each layer, and its way in
        rows = config.integer("vocab_size_per_layer_input", vocab)
        weights.append(_table("embed_per_layer", rows * narrow * layers))
        weights.append(Weights(name="per_layer_proj", parameters=3 * hidden * narrow * layers, shard="replicated"))
    return weights + _towers(config)


def _table(name: str, parameters: int, active: float = 0.0) -> Weights:
    return Weights(name=name, parameters=parameters, linear=False, active=active)


def _towers(config: ConfigReader) -> list[Weights]:
    """One kind of weights each; a tower whose sizes are not in the config counts as nothing."""
    found = []
    for name in _TOWERS:
        part = config.root.get(name)
        size = _tower(part, config.integer("hidden")) if isinstance(part, Mapping) else 0
        if size:
            found.append(_table(name.removesuffix("_config") + "_tower", size))
    return found


def _tower(part: Mapping[str, Any], text_hidden: int) -> int:
    width = _first(part, "embed_dim", "hidden_size", "d_model")
    layers = _first(part, "depth", "num_hidden_layers", "encoder_layers", "layers")
    if not width or not layers:
        return 0
    inner = _first(part, "intermediate_size", "encoder_ffn_dim") or round(width * float(part.get("mlp_ratio") or 4))
    gated = str(part.get("model_type", "")).startswith(("pixtral", "qwen2_5_vl"))
    patch = _first(part, "patch_size", "spatial_patch_size") or 14
    frames = int(part.get("temporal_patch_size") or 1)
    image = part.get("image_size")
    positions = (image // patch) ** 2 if isinstance(image, int) and not gated else 0
    merged = int(part.get("spatial_merge_size") or 1) ** 2
    out = _first(part, "out_hidden_size") or text_hidden
    blocks = layers * (4 * width * width + (3 if gated else 2) * width * inner)
    merger = width * merged * (width * merged if merged > 1 else 0) + width * merged * out
    return blocks + width * (3 * frames * patch * patch + positions) + merger


def _first(part: Mapping[str, Any], *names: str) -> int:
    return next((int(part[name]) for name in names if isinstance(part.get(name), int)), 0)
