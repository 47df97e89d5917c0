"""What vLLM does with flags that are left out, and how its versions differ in what they count as memory."""

from __future__ import annotations

import re
from dataclasses import dataclass

from autotune.physics.gpus import GIB, Gpu


@dataclass(frozen=True, kw_only=True)
class Rules:
    """One range of vLLM versions."""

    gpu_memory_utilization: float
    """Default share of the card."""
    sampler_bytes_per_logit: float
    """Peak of the sampler's dummy run, per sequence and vocabulary entry."""
    counts_nccl: bool
    """Communication buffers lie inside the budget (memory is read before they exist)."""
    counts_graphs: bool
    """The estimate of CUDA-graph memory is taken off the KV cache."""
    batches_in_flight: int
    """Batches of max_num_batched_tokens that a window layer's admission reserves for."""


# Read from the sources of 0.11, 0.20, 0.22.1, 0.25, 0.28 and 0.32; where only the two ends are known, the later.
# Sampler: bf16 logits and three fp32 copies (2 + 3 x 4 bytes); before 0.16 it sorted the vocabulary, with values,
# 8-byte indices and the sort's own buffers: 44 fits the 55.62 GiB that 0.10.0 left on 80 GB cards.
_OLD = Rules(
    gpu_memory_utilization=0.90,
    sampler_bytes_per_logit=44.0,
    counts_nccl=True,
    counts_graphs=False,
    batches_in_flight=1,
)
_BEFORE_020 = Rules(
    gpu_memory_utilization=0.90,
    sampler_bytes_per_logit=14.0,
    counts_nccl=False,
    counts_graphs=False,
    batches_in_flight=1,
)
_BEFORE_021 = Rules(
    gpu_memory_utilization=0.92,
    sampler_bytes_per_logit=14.0,
    counts_nccl=False,
    counts_graphs=False,
    batches_in_flight=1,
)
_MEASURED = Rules(
    gpu_memory_utilization=0.92,
    sampler_bytes_per_logit=14.0,
    counts_nccl=False,
    counts_graphs=True,
    batches_in_flight=1,
)
_FROM_026 = Rules(
    gpu_memory_utilization=0.92,
    sampler_bytes_per_logit=14.0,
    counts_nccl=False,
    counts_graphs=True,
    batches_in_flight=2,
)
_FIRST = (((0, 16), _OLD), ((0, 20), _BEFORE_020), ((0, 21), _BEFORE_021), ((0, 26), _MEASURED))


def rules_for(version: str | None) -> Rules:
    """The rules of a vLLM version; those that were measured (0.22) when it is not known."""
    numbers = re.match(r"v?(\d+)\.(\d+)", version or "")
    if numbers is None:
        return _MEASURED
    key = (int(numbers[1]), int(numbers[2]))
    return next((rules for before, rules in _FIRST if key < before), _FROM_026)


def default_limits(gpu: Gpu) -> tuple[int, int]:
    """``max_num_seqs`` and ``max_num_batched_tokens`` of ``vllm serve`` when left out.

    Source: ``engine/arg_utils.py:get_batch_defaults``; cards of 160 GiB and more take 16,384 only since 0.26, so
    that the older 8,192 is kept here.
    """
    big = gpu.memory_bytes >= 70 * GIB and not gpu.name.startswith(("A100", "GB10")) and not gpu.is_cpu
    return (1024, 8192) if big else (256, 2048)
