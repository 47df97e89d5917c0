"""Layers that keep a constant state instead of a KV cache: gated delta nets, Mamba, short convolutions, lightning."""

from __future__ import annotations

from autotune.physics.blocks import Kv, Weights
from autotune.physics.config_reader import ConfigReader

_FLOAT32 = 4


def state_layer(config: ConfigReader) -> tuple[list[Weights], tuple[Kv, ...]]:
    """Weights and state of one such layer.

    Raises:
        InputError: the sizes of the state are not in the config; names the key.
    """
    if config.get("linear_num_value_heads"):
        return _delta_net(config)
    if isinstance(config.get("linear_attn_config"), dict) or config.is_type("kimi_linear"):
        return _kimi(config)
    if config.get("conv_L_cache") is not None:
        return _short_convolution(config)
    if config.is_type("minimax"):
        return _lightning(config)
    return _mamba1(config) if config.get("mamba_dt_rank") is not None else _mamba2(config)


def _layer(projections: int, state_elements: int, state_bytes: int = 0) -> tuple[list[Weights], tuple[Kv, ...]]:
    weights = [Weights(name="mixer.in_proj", parameters=projections)]
    return weights, (Kv(kind="state", state_elements=state_elements, state_bytes=state_bytes),)


def _delta_net(config: ConfigReader) -> tuple[list[Weights], tuple[Kv, ...]]:
    """Qwen3-Next and Qwen3.5: queries, keys, values and gates in, a matrix of key x value per value head kept."""
    hidden = config.integer("hidden")
    key = config.integer("linear_num_key_heads") * config.integer("linear_key_head_dim")
    value_heads, value_dim = config.integer("linear_num_value_heads"), config.integer("linear_value_head_dim")
    value, kernel = value_heads * value_dim, config.integer("linear_conv_kernel_dim", 4)
    channels = 2 * key + value
    projections = hidden * (2 * key + 3 * value + 2 * value_heads) + channels * kernel
    matrix = value_heads * value_dim * config.integer("linear_key_head_dim")
    wide = str(config.get("mamba_ssm_dtype", "")) == "float32"
    convolution = channels * (kernel - 1)
    return _layer(projections, convolution + (0 if wide else matrix), matrix * _FLOAT32 if wide else 0)


def _kimi(config: ConfigReader) -> tuple[list[Weights], tuple[Kv, ...]]:
    """Kimi delta attention: per head a float32 matrix of dim x dim, and three short convolutions."""
    part = config.get("linear_attn_config") or {}
    hidden = config.integer("hidden")
    heads, dim = config.integer("linear_num_heads", part.get("num_heads")), part.get("head_dim")
    dim, kernel = config.integer("linear_head_dim", dim), int(part.get("short_conv_kernel_size", 4))
    inner = heads * dim
    projections = 4 * hidden * inner + 2 * (hidden * dim + dim * inner) + hidden * heads + 3 * inner * kernel
    return _layer(projections, 3 * inner * (kernel - 1), heads * dim * dim * _FLOAT32)


def _short_convolution(config: ConfigReader) -> tuple[list[Weights], tuple[Kv, ...]]:
    """LFM2: three gates in, one out, a few positions kept."""
    hidden, kept = config.integer("hidden"), config.integer("conv_L_cache")
    return _layer(4 * hidden * hidden + hidden * kept, hidden * (kept - 1))


def _lightning(config: ConfigReader) -> tuple[list[Weights], tuple[Kv, ...]]:
    """MiniMax-01: linear attention with a float32 matrix of dim x dim per head, gated output."""
    hidden, heads = config.integer("hidden"), config.integer("heads")
    dim = config.integer("head_dim", hidden // heads)
    return _layer(5 * hidden * heads * dim, 0, heads * dim * dim * _FLOAT32)


def _mamba1(config: ConfigReader) -> tuple[list[Weights], tuple[Kv, ...]]:
    """Jamba: inner channels with a state of d_state each."""
    hidden, state, kernel = config.integer("hidden"), config.integer("mamba_d_state"), config.integer("mamba_d_conv")
    inner, rank = config.integer("mamba_expand") * hidden, config.integer("mamba_dt_rank")
    projections = hidden * 3 * inner + inner * (2 * rank + 3 * state + kernel)
    return _layer(projections, inner * (kernel - 1) + inner * state)


def _mamba2(config: ConfigReader) -> tuple[list[Weights], tuple[Kv, ...]]:
    """Mamba-2 (Nemotron-H, Bamba, Granite-4, Falcon-H1): heads x head_dim x d_state, and a short convolution."""
    hidden = config.integer("hidden")
    heads = config.integer("mamba_num_heads", config.integer("mamba_n_heads", 0) or None)
    dim = _either(config, "mamba_head_dim", "mamba_d_head", config.integer("mamba_expand", 2) * hidden // heads)
    state = _either(config, "ssm_state_size", "mamba_d_state")
    groups = _either(config, "n_groups", "mamba_n_groups", 1)
    kernel = _either(config, "conv_kernel", "mamba_d_conv", 4)
    inner = heads * dim
    channels = inner + 2 * groups * state
    projections = hidden * (inner + channels + heads) + inner * hidden + channels * kernel
    wide = str(config.get("mamba_ssm_cache_dtype", "")) == "float32" or config.is_type("nemotron_h")
    matrix = heads * dim * state
    return _layer(projections, channels * (kernel - 1) + (0 if wide else matrix), matrix * _FLOAT32 if wide else 0)


def _either(config: ConfigReader, first: str, second: str, default: int | None = None) -> int:
    for key in (first, second):
        if isinstance(config.get(key), int):
            return config.integer(key)
    return config.integer(first, default)
