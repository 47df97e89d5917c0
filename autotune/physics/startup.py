"""What a server start costs, and which starts share one compile cache: orders of magnitude until measured."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping

from autotune.physics.gpus import Hardware
from autotune.physics.layout import read_layout
from autotune.physics.memory import adjusted
from autotune.physics.model_card import ModelCard
from autotune.physics.rules import rules_for

PROCESS_S = 20.0
"""Imports, config, profiling and the API server."""
LOAD_BYTES_PER_S = 2e9
"""Reading weights from a local disk into one GPU."""
COMPILE_S, CACHED_S = 97.0, 32.0
"""Compiling and capturing 64 layers: with an empty cache, and with one that holds the code. Qwen3-32B on an H200,
vLLM 0.22.1, dummy weights: 108 s cold, 84 s warm; 150-201 s cold with two GPUs or 8-bit weights."""
EAGER_S = 5.0
RANKS_S = 8.0
"""For each doubling of the processes that have to meet."""

NEUTRAL = frozenset(
    {
        "async_scheduling",
        "data_parallel_backend",
        "disable_log_stats",
        "enable_prefix_caching",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "load_format",
        "max_num_active_seqs",
        "num_gpu_blocks_override",
        "seed",
        "watermark",
    }
)
"""Flags that are not in the key of vLLM's compile cache (``compute_hash`` of its configs, 0.20 to 0.33)."""
_RESOLVED = frozenset(
    {
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "data_parallel_size",
        "decode_context_parallel_size",
        "enable_expert_parallel",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_dtype",
        "block_size",
    }
)
"""Flags that are in the key with vLLM's default where they are left out."""


def compile_key(card: ModelCard, hardware: Hardware, settings: Mapping[str, object]) -> Hashable:
    """Equal for settings whose starts find each other's compiled code; flags that nobody knows are in it."""
    layout = read_layout(settings, adjusted(card, settings), hardware.gpu, rules_for(None))
    left = {name: settings[name] for name in sorted(settings) if name not in NEUTRAL | _RESOLVED}
    return (
        (layout.tp, layout.pp, layout.dp, layout.context_parallel, layout.expert_parallel, layout.block_size),
        (layout.max_model_len, layout.max_num_seqs, layout.max_num_batched_tokens, layout.kv_cache_dtype),
        json.dumps(left, sort_keys=True),
    )


def load_s(card: ModelCard, hardware: Hardware, settings: Mapping[str, object]) -> float:
    """Seconds until the weights are in the GPUs' memory."""
    if settings.get("load_format") == "dummy":
        return PROCESS_S
    card = adjusted(card, settings)
    layout = read_layout(settings, card, hardware.gpu, rules_for(None))
    weights = card.weight_bytes_per_gpu(layout.tp, layout.pp, layout.expert_parallel, layout.dp)
    return PROCESS_S + weights / LOAD_BYTES_PER_S


def startup_s(card: ModelCard, hardware: Hardware, settings: Mapping[str, object], *, warm: bool) -> float:
    """Seconds from the start of the process to ready; ``warm``: its compile cache is filled."""
    layout = read_layout(settings, adjusted(card, settings), hardware.gpu, rules_for(None))
    code = EAGER_S if layout.eager else (CACHED_S if warm else COMPILE_S) * card.layers / 64
    return load_s(card, hardware, settings) + code + RANKS_S * math.log2(max(1, layout.gpus))
