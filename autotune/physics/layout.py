"""What a set of flags means for memory: parallel layout and limits, vLLM's defaults filled in."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.errors import InputError
from autotune.physics.gpus import Gpu
from autotune.physics.model_card import ModelCard
from autotune.physics.rules import Rules, default_limits

# vLLM reads 32k as 32,000 and 32K as 32,768 (utils/argparse_utils.py, human_readable_int).
_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The flags that memory depends on."""

    tp: int
    pp: int
    dp: int
    context_parallel: int
    expert_parallel: bool
    max_model_len: int
    fitted_len: bool
    """``max_model_len`` is auto: vLLM takes what fits."""
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    kv_cache_dtype: str
    block_size: int
    eager: bool
    """No CUDA graphs."""
    windows: bool
    """Window layers drop what they no longer see (the hybrid KV cache manager, on by default)."""
    scaled: bool
    """``hf_overrides`` or ``rope_scaling`` may have made the model longer than its config says."""
    kv_cache_memory_bytes: int | None
    """KV memory of one GPU, set by hand."""
    num_gpu_blocks: int | None
    """Blocks set by hand."""

    @property
    def engine_gpus(self) -> int:
        """GPUs of one data-parallel engine."""
        return self.tp * self.pp

    @property
    def gpus(self) -> int:
        """GPUs in all."""
        return self.engine_gpus * self.dp


def read_layout(settings: Mapping[str, object], card: ModelCard, gpu: Gpu, rules: Rules) -> Layout:
    """The layout that ``settings`` (vLLM's long names) give ``card`` on ``gpu``.

    Raises:
        InputError: a flag that is no number where one is needed, or below 1.
    """
    seqs, batched = default_limits(gpu)
    if settings.get("performance_mode") == "throughput":
        seqs, batched = 2 * seqs, 2 * batched
    asked = settings.get("max_model_len")
    fitted = asked in ("auto", -1, "-1")
    length = card.max_model_len if fitted or asked is None else whole(settings, "max_model_len", 0)
    seqs = whole(settings, "max_num_seqs", seqs)
    batched = whole(settings, "max_num_batched_tokens", min(batched, seqs * length))
    if settings.get("max_num_seqs") is None:
        seqs = min(seqs, batched)
    has_memory = settings.get("kv_cache_memory_bytes") is not None
    has_blocks = settings.get("num_gpu_blocks_override") is not None
    mode = settings.get("optimization_level")
    return Layout(
        tp=whole(settings, "tensor_parallel_size", 1),
        pp=whole(settings, "pipeline_parallel_size", 1),
        dp=whole(settings, "data_parallel_size", 1),
        context_parallel=whole(settings, "decode_context_parallel_size", 1),
        expert_parallel=settings.get("enable_expert_parallel") is True,
        max_model_len=length,
        fitted_len=fitted,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
        gpu_memory_utilization=_share(settings, rules.gpu_memory_utilization),
        kv_cache_dtype=str(settings.get("kv_cache_dtype") or "auto"),
        block_size=whole(settings, "block_size", 128 if gpu.is_cpu else 16),
        eager=settings.get("enforce_eager") is True or mode == 0 or gpu.is_cpu,
        windows=settings.get("disable_hybrid_kv_cache_manager") is not True,
        scaled=bool(settings.get("hf_overrides") or settings.get("rope_scaling")),
        kv_cache_memory_bytes=whole(settings, "kv_cache_memory_bytes", 1) if has_memory else None,
        num_gpu_blocks=whole(settings, "num_gpu_blocks_override", 1) if has_blocks else None,
    )


def whole(settings: Mapping[str, object], name: str, default: int) -> int:
    """A flag that vLLM reads as a whole number of at least 1; ``32k`` and ``32K`` as vLLM does.

    Raises:
        InputError: anything else.
    """
    value = settings.get(name)
    if value is None:
        return default
    if isinstance(value, str):
        found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)(?:i?B)?", value.strip())
        value = int(float(found[1]) * _UNITS.get(found[2], 1)) if found else value
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} must be a whole number of at least 1, got {settings[name]!r}")
    return value


def _share(settings: Mapping[str, object], default: float) -> float:
    value = settings.get("gpu_memory_utilization", settings.get("device_memory_utilization"))
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise InputError(f"gpu_memory_utilization must be above 0 and at most 1, got {value!r}")
    return float(value)
