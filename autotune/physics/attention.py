"""Attention layers read from a config: which kind each is, what they weigh and what they keep per token."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.errors import InputError
from autotune.physics.blocks import Kv, KvKind, Weights
from autotune.physics.config_reader import ConfigReader

# Names in layer_types and layers_block_type.
_KINDS = {
    "full_attention": "full",
    "attention": "full",
    "indexed_attention": "full",
    "global_attention": "full",
    "global": "full",
    "sliding_attention": "sliding",
    "local_attention": "sliding",
    "local": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "linear",
    "gated_deltanet": "linear",
    "mamba": "linear",
    "mamba2": "linear",
    "conv": "linear",
    "recurrent": "linear",
    "hybrid": "both",
    "mlp": "mlp",
    "moe": "moe",
}
# Nemotron-H: M state, * attention, - dense feed-forward, E experts.
_NEMOTRON = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
# How many layers apart the full ones are when the file gives a window but no pattern.
_WINDOW_PERIOD = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2, "exaone4": 4, "olmo3": 4}
# Types whose window means nothing unless they say use_sliding_window.
_WINDOW_OFF = ("qwen2", "qwen3", "glm", "llama", "deepseek")


def layer_kinds(config: ConfigReader) -> list[str]:
    """One word a layer: full, sliding, chunked, linear (constant state), both (attention beside a state), mlp, moe.

    Raises:
        InputError: the list of layers is shorter than the model, or names a kind that is not known.
    """
    pattern = config.get("hybrid_override_pattern")
    listed = config.list_("layer_types") or config.list_("layers_block_type") or config.list_("attention_layers")
    if isinstance(pattern, str):
        listed = [_NEMOTRON.get(letter, letter) for letter in pattern]
    layers = config.integer("layers", len(listed) or None)
    if listed:
        return _checked(config, [_KINDS.get(str(word), str(word)) for word in listed], layers)
    full = _full_layers(config, layers)
    if full is not None:
        return ["full" if i in full else "linear" for i in range(layers)]
    if config.is_type("falcon_h1"):
        return ["both"] * layers
    chunk = config.get("attention_chunk_size")
    if chunk and config.is_type("llama4"):
        rope = config.list_("no_rope_layers")
        with_rope = [bool(r) for r in rope] if len(rope) == layers else [(i + 1) % 4 != 0 for i in range(layers)]
        return ["chunked" if r else "full" for r in with_rope]
    return _window_kinds(config, layers)


def _checked(config: ConfigReader, kinds: list[str], layers: int) -> list[str]:
    known = {*_KINDS.values()}
    unknown = sorted(set(kinds) - known)
    if unknown:
        raise InputError(f"the config of {config.name} has layers of an unknown kind: {', '.join(unknown)}")
    if len(kinds) < layers:
        raise InputError(f"the config of {config.name} names {len(kinds)} layers, num_hidden_layers says {layers}")
    return kinds[:layers]


def _full_layers(config: ConfigReader, layers: int) -> set[int] | None:
    """Indices of the attention layers of a model whose other layers keep a constant state; None: no such model."""
    if config.get("full_attention_interval"):
        period = config.integer("full_attention_interval")
        return {i for i in range(layers) if (i + 1) % period == 0}
    if config.is_type("qwen3_next", "qwen3_5"):
        return {i for i in range(layers) if (i + 1) % 4 == 0}
    if config.get("attn_layer_period"):
        period, offset = config.integer("attn_layer_period"), config.integer("attn_layer_offset", 0)
        return {i for i in range(layers) if i % period == offset}
    if config.get("attn_layer_indices") is not None:
        return {int(i) for i in config.list_("attn_layer_indices")}
    if config.get("full_attn_idxs") is not None:
        return {int(i) for i in config.list_("full_attn_idxs")}
    if config.list_("attn_type_list"):
        return {i for i, kind in enumerate(config.list_("attn_type_list")) if kind == 1}
    linear = config.get("linear_attn_config")
    if isinstance(linear, dict) and "full_attn_layers" in linear:
        return {int(i) - 1 for i in linear["full_attn_layers"]}  # Kimi counts from 1
    return None


def _window_kinds(config: ConfigReader, layers: int) -> list[str]:
    listed = config.list_("hybrid_layer_pattern")  # MiMo: 1 is a window layer
    if len(listed) == layers:
        return ["sliding" if word else "full" for word in listed]
    window, wanted = config.get("sliding_window"), config.get("use_sliding_window")
    if not window or wanted is False or (wanted is None and config.is_type(*_WINDOW_OFF)):
        return ["full"] * layers
    pattern = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern")
    if isinstance(pattern, str):  # exaone4: LLLG
        return ["sliding" if pattern[i % len(pattern)].upper() == "L" else "full" for i in range(layers)]
    period = int(pattern or _WINDOW_PERIOD.get(config.model_type, 0))
    if period > 1:
        return ["full" if (i + 1) % period == 0 else "sliding" for i in range(layers)]
    first = config.integer("max_window_layers", 0) if config.is_type("qwen2", "qwen3") else 0
    return ["sliding" if i >= first else "full" for i in range(layers)]


def is_latent(config: ConfigReader) -> bool:
    """Whether vLLM runs the attention as MLA, with one latent vector for all heads."""
    return config.get("kv_lora_rank") is not None and not config.is_type("minicpm3")


def kv_heads(config: ConfigReader) -> int:
    """KV heads of a full-attention layer."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return config.integer("kv_heads", config.integer("heads"))


def head_dim(config: ConfigReader) -> int:
    """Elements of one query head."""
    if is_latent(config):
        return config.integer("qk_nope_head_dim") + config.integer("qk_rope_head_dim", 0)
    heads = config.integer("heads")
    derived = config.integer("hidden") // heads if heads else 0
    return config.integer("head_dim", derived)


def attention(config: ConfigReader, kind: str, index: int) -> tuple[list[Weights], tuple[Kv, ...]]:
    """Weights and KV of attention layer number ``index``."""
    if config.get("kv_lora_rank") is None:
        return _grouped(config, kind, index)
    weights, kvs = _latent(config)
    if is_latent(config):
        return weights, kvs
    # MiniCPM-3: low-rank projections, but vLLM caches the expanded heads, values padded to the keys' width.
    width = 2 * (config.integer("qk_nope_head_dim") + config.integer("qk_rope_head_dim"))
    return weights, (Kv(kind="full", heads=config.integer("heads"), width=width),)


@dataclass(frozen=True, kw_only=True)
class _Heads:
    """Heads of one layer; Gemma-4's global layers and MiMo's window layers have others than the rest."""

    query: int
    kv: int
    dim: int
    value_dim: int
    key_is_value: bool = False


def _heads(config: ConfigReader, kind: str) -> _Heads:
    heads, key_heads, dim = config.integer("heads"), kv_heads(config), head_dim(config)
    value_dim = config.integer("v_head_dim", dim)
    if kind == "full" and config.get("global_head_dim"):
        shared = bool(config.get("attention_k_eq_v"))
        dim = config.integer("global_head_dim")
        key_heads = config.integer("num_global_key_value_heads", key_heads) if shared else key_heads
        return _Heads(query=heads, kv=key_heads, dim=dim, value_dim=dim, key_is_value=shared)
    if kind == "sliding" and config.get("swa_num_key_value_heads"):
        return _Heads(
            query=config.integer("swa_num_attention_heads", heads),
            kv=config.integer("swa_num_key_value_heads"),
            dim=config.integer("swa_head_dim", dim),
            value_dim=config.integer("swa_v_head_dim", value_dim),
        )
    return _Heads(query=heads, kv=key_heads, dim=dim, value_dim=value_dim)


def _grouped(config: ConfigReader, kind: str, index: int) -> tuple[list[Weights], tuple[Kv, ...]]:
    hidden, heads = config.integer("hidden"), _heads(config, kind)
    gate = 2 if config.get("attn_output_gate") or config.is_type("qwen3_next", "qwen3_5") else 1
    weights = [
        Weights(name="self_attn.q_proj", parameters=hidden * heads.query * heads.dim * gate),
        Weights(name="self_attn.o_proj", parameters=heads.query * heads.value_dim * hidden),
    ]
    shared = config.integer("num_kv_shared_layers", 0)
    shares_kv = bool(shared) and index >= config.integer("layers") - shared
    if shares_kv and config.is_type("gemma4"):
        return weights, ()
    width = heads.dim if heads.key_is_value else heads.dim + heads.value_dim
    size = hidden * heads.kv * width
    weights.append(Weights(name="self_attn.k_proj", parameters=size, shard="heads", units=heads.kv))
    if shares_kv:  # Gemma-3n reads the cache of an earlier layer
        return weights, ()
    shape, window = _shape(config, kind)
    return weights, (Kv(kind=shape, heads=heads.kv, width=heads.dim + heads.value_dim, window=window),)


def _shape(config: ConfigReader, kind: str) -> tuple[KvKind, int]:
    """Kind of KV and its window; a window that no context outgrows is none."""
    if kind == "sliding" and 0 < (window := config.integer("sliding_window", 0)) < config.max_model_len:
        return "sliding", window
    if kind == "chunked" and 0 < (window := config.integer("attention_chunk_size", 0)) < config.max_model_len:
        return "chunked", window
    return "full", 0


def _latent(config: ConfigReader) -> tuple[list[Weights], tuple[Kv, ...]]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values live in kv_lora_rank elements,
    beside one rotary key of qk_rope_head_dim that all heads share."""
    hidden, heads = config.integer("hidden"), config.integer("heads")
    latent, rope = config.integer("kv_lora_rank"), config.integer("qk_rope_head_dim", 0)
    nope = config.integer("qk_nope_head_dim")
    value = config.integer("v_head_dim", config.integer("hidden") // heads)
    rank = config.integer("q_lora_rank", 0)
    weights = [
        Weights(name="self_attn.q_b_proj", parameters=(rank or hidden) * heads * (nope + rope)),
        Weights(name="self_attn.kv_a_proj", parameters=hidden * (latent + rope), shard="replicated"),
        Weights(name="self_attn.kv_b_proj", parameters=latent * heads * (nope + value)),
        Weights(name="self_attn.o_proj", parameters=heads * value * hidden),
    ]
    if rank:
        weights.append(Weights(name="self_attn.q_a_proj", parameters=hidden * rank, shard="replicated"))
    extra = 0
    if config.get("index_topk"):  # sparse MLA (DeepSeek-V3.2): fp8 index keys with one fp32 scale each
        index_heads, index_dim = config.integer("index_n_heads"), config.integer("index_head_dim")
        extra = index_dim + 4
        size = (rank or hidden) * index_heads * index_dim + hidden * (index_dim + index_heads)
        weights.append(Weights(name="self_attn.indexer", parameters=size, shard="replicated"))
    kv = Kv(kind="full", heads=1, width=latent + rope, latent=True, extra_bytes=extra)
    return weights, (kv,)
