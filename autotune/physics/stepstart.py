"""Start values of the step model before anything is measured, and their transfer to another set-up."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from autotune.physics.gpus import Hardware
from autotune.physics.layout import Layout, read_layout
from autotune.physics.memory import MemoryModel, adjusted
from autotune.physics.model_card import ModelCard
from autotune.physics.simulator import EngineLimits
from autotune.physics.steptime import StepModel

FIXED_S = 4.2e-3
"""Launch, scheduling and sampling of a step: t0 of Qwen3-32B on one H200 (vLLM 0.22.1, 19.4 ms) less its weights."""
KV_EFFICIENCY = 0.93
"""Of the copy bandwidth when attention reads the cache (H200: 65.9 ns for 256 KiB at 4.3 TB/s)."""
COMPUTE_EFFICIENCY = 0.8
"""Of the FLOP/s of a large product when prompts are computed (H200, Qwen3-32B: 105 us a token, 790 TFLOP/s)."""
LINK_EFFICIENCY = 0.67
"""Of a link's bandwidth that an all-reduce reaches (300 of 450 GB/s)."""
FP8_KV_FACTOR = 0.9
"""Time to read one token of an fp8 cache over that of a 16-bit one. A guess: two points of one H200."""
SEQUENCE_S, SEQUENCE_WIDTH_S = 5e-6, 15e-6
"""Per sequence: a constant part, and one that grows with layers x hidden size (64 x 5,120: 18-27 us in all)."""
BEYOND_S = 60e-6
"""Per sequence above the CUDA-graph limit, 64 layers (one H100 run at batch 512-1,000: 80 us)."""
WINDOW_CONTEXT = 8192
"""Context at which window layers and states are counted, tokens: beyond most windows."""
GRAPH_LIMIT = 512
"""Largest captured batch: min(2 x max_num_seqs, 512) by default."""

WEIGHT_SD, FIXED_SD, ALL_REDUCE_SD = 0.10, 0.5, 0.5
"""How wrong the parts of t0 may be (relative): the fixed part differs between hosts and vLLM versions."""
PHYSICS_SD = {"sequence_s": 0.6, "kv_token_s": 0.3, "prefill_token_s": 0.3, "beyond_s": 0.8}
"""How wrong each other constant may be (relative) before a window of that set-up is seen."""
FP8_SD = 0.35
"""The same for ``kv_token_s`` of an fp8 cache."""
TRANSFER_SD = {"t0_s": 0.10, "sequence_s": 0.3, "kv_token_s": 0.12, "prefill_token_s": 0.10}
"""What another tensor-parallel size adds (TP 2 from TP 1 on H200: 7 % rms)."""


def physics_model(
    *,
    weight_bytes: float,
    kv_bytes_per_token: float,
    active_parameters: float,
    layers: int,
    hidden_size: int,
    bandwidth_bytes_per_s: float,
    flops_per_s: float,
    gpus: int = 1,
    fp8_kv: bool = False,
    graph_limit: int = GRAPH_LIMIT,
    expert_bytes: float = 0.0,
    expert_share: float = 1.0,
    constant_kv_bytes: float = 0.0,
    all_reduce_s: float = 8e-6,
    link_bytes_per_s: float = 450e9,
    fixed_s: float = FIXED_S,
) -> StepModel:
    """The model's constants from sizes and speeds alone.

    Args:
        weight_bytes: weights that one GPU reads in a step of a large batch (all experts).
        kv_bytes_per_token: cache of one token on one GPU, as if it were of 16 bits.
        active_parameters: parameters that one token uses, over all GPUs of the engine.
        bandwidth_bytes_per_s: memory of one GPU, as a copy reaches it.
        flops_per_s: of one GPU, as a large product reaches it.
        gpus: of one engine (tensor parallel).
        expert_bytes: the routed experts' part of ``weight_bytes``.
        expert_share: share of the routed experts that one token uses.
        constant_kv_bytes: what a sequence holds on one GPU however long it is (windows, states).
        all_reduce_s: latency of one small all-reduce.
        link_bytes_per_s: between GPUs, one direction.
    """
    all_reduces = 2 * layers if gpus > 1 else 0
    moved = 2 * hidden_size * 2 * (gpus - 1) / gpus  # 16 bits, there and back
    width = layers * hidden_size / (64 * 5120)
    kv_speed = bandwidth_bytes_per_s * KV_EFFICIENCY
    weights_s, reduce_s = weight_bytes / bandwidth_bytes_per_s, all_reduces * all_reduce_s
    t0_s = fixed_s + weights_s + reduce_s
    t0_sd = math.hypot(WEIGHT_SD * weights_s, FIXED_SD * fixed_s, ALL_REDUCE_SD * reduce_s) / t0_s
    reduce_width_s = all_reduces * moved / (link_bytes_per_s * LINK_EFFICIENCY)
    return StepModel(
        t0_s=t0_s,
        sequence_s=SEQUENCE_S + SEQUENCE_WIDTH_S * width + reduce_width_s + constant_kv_bytes / kv_speed,
        kv_token_s=kv_bytes_per_token / kv_speed * (FP8_KV_FACTOR if fp8_kv else 1.0),
        prefill_token_s=2 * active_parameters / (flops_per_s * COMPUTE_EFFICIENCY * gpus),
        beyond_s=BEYOND_S * layers / 64,
        graph_limit=graph_limit,
        compute_s=2 * active_parameters / (flops_per_s * gpus),
        expert_s=expert_bytes / bandwidth_bytes_per_s,
        expert_share=expert_share,
    ).with_sd(**{"t0_s": t0_sd, **PHYSICS_SD, **({"kv_token_s": FP8_SD} if fp8_kv else {})})


def from_card(
    card: ModelCard, hardware: Hardware, settings: Mapping[str, object], memory: MemoryModel | None = None
) -> StepModel:
    """Start values for a model on these cards with these flags (vLLM's long names).

    Raises:
        InputError: a flag that is no number where one is needed.
    """
    card = adjusted(card, settings)
    gpu, layout = hardware.gpu, read_layout(settings, card, hardware.gpu, (memory or MemoryModel()).rules)
    gpus = layout.tp * layout.pp
    fp8_kv = card.kv_element_bytes(layout.kv_cache_dtype) < card.element_bytes
    # The reading of an fp8 cache is set against that of a 16-bit one: its bytes buy capacity, hardly speed.
    stored = "bfloat16" if fp8_kv else layout.kv_cache_dtype
    growth = card.kv_bytes_per_token_per_gpu(layout.tp, stored, layout.pp)
    held = card.kv_bytes(WINDOW_CONTEXT, stored, layout.tp) - WINDOW_CONTEXT * growth * layout.pp
    experts = [w for block in card.blocks for w in block.weights if w.shard == "experts"]
    fp8_weights = card.quantization is not None and card.weight_bytes() < 1.4 * card.parameters
    eight_bit = fp8_weights and card.weight_bytes() > 0.9 * card.parameters
    return physics_model(
        weight_bytes=card.weight_bytes_per_gpu(layout.tp, layout.pp, layout.expert_parallel, layout.dp),
        kv_bytes_per_token=growth,
        active_parameters=card.active_parameters,
        layers=card.layers,
        hidden_size=card.hidden_size,
        bandwidth_bytes_per_s=gpu.bandwidth_bytes_per_s,
        flops_per_s=gpu.fp8_flops_per_s if eight_bit else gpu.bf16_flops_per_s,
        gpus=gpus,
        fp8_kv=fp8_kv,
        graph_limit=_graph_limit(settings, layout),
        expert_bytes=sum(w.bytes_per_gpu(layout.tp, layout.dp, layout.expert_parallel) for w in experts) / layout.pp,
        expert_share=card.experts_per_token / card.experts if card.experts else 1.0,
        constant_kv_bytes=max(0.0, held),
        all_reduce_s=gpu.all_reduce_s,
        link_bytes_per_s=gpu.link_bytes_per_s,
    )


def engine_limits(
    card: ModelCard, hardware: Hardware, settings: Mapping[str, object], kv_capacity_tokens: int
) -> EngineLimits:
    """Limits of one engine; ``kv_capacity_tokens`` is the sum over the engines, as logged."""
    layout = read_layout(settings, adjusted(card, settings), hardware.gpu, MemoryModel().rules)
    return EngineLimits(
        kv_tokens=kv_capacity_tokens // layout.dp,
        max_num_seqs=layout.max_num_seqs,
        max_num_batched_tokens=max(layout.max_num_batched_tokens, layout.max_num_seqs),
        block_size=layout.block_size,
    )


def transfer(
    model: StepModel,
    from_settings: Mapping[str, object],
    to_settings: Mapping[str, object],
    card: ModelCard,
    hardware: Hardware,
) -> StepModel:
    """Constants for flags that were not measured, from a model fitted under others; see ``transferred``."""
    return transferred(model, from_card(card, hardware, from_settings), from_card(card, hardware, to_settings))


def transferred(model: StepModel, start_from: StepModel, start_to: StepModel) -> StepModel:
    """Constants of a set-up that was not measured, from those of one that was.

    Times that add up (``t0``, per sequence) move by the difference of the physical start values, times
    that scale (KV, prefill) by their ratio. What moves becomes less certain and is called a guess.

    Args:
        model: fitted to the first set-up.
        start_from: physical start of the first set-up.
        start_to: physical start of the second set-up.
    """
    moved = {
        "t0_s": max(0.3 * start_to.t0_s, model.t0_s + start_to.t0_s - start_from.t0_s),
        "sequence_s": max(0.3 * start_to.sequence_s, model.sequence_s + start_to.sequence_s - start_from.sequence_s),
        "kv_token_s": model.kv_token_s * _ratio(start_to.kv_token_s, start_from.kv_token_s),
        "prefill_token_s": model.prefill_token_s * _ratio(start_to.prefill_token_s, start_from.prefill_token_s),
    }
    changed = [n for n in moved if abs(_ratio(getattr(start_to, n), getattr(start_from, n)) - 1) > 1e-6]
    dtype = start_to.relative_sd["kv_token_s"] != start_from.relative_sd["kv_token_s"]
    extra = {n: FP8_SD if n == "kv_token_s" and dtype else TRANSFER_SD[n] for n in changed}
    return dataclasses.replace(
        model,
        t0_s=moved["t0_s"],
        sequence_s=moved["sequence_s"],
        kv_token_s=moved["kv_token_s"],
        prefill_token_s=moved["prefill_token_s"],
        graph_limit=start_to.graph_limit,
        compute_s=model.compute_s * _ratio(start_to.compute_s, start_from.compute_s),
        expert_s=start_to.expert_s,
        expert_share=start_to.expert_share,
        guesses=tuple(dict.fromkeys((*model.guesses, *changed))),
    ).widened(**extra)


def _graph_limit(settings: Mapping[str, object], layout: Layout) -> int:
    if layout.eager:
        return 0
    asked = settings.get("max_cudagraph_capture_size")
    if isinstance(asked, int) and not isinstance(asked, bool) and asked > 0:
        return asked
    sizes = settings.get("cudagraph_capture_sizes")
    if isinstance(sizes, list) and sizes and all(isinstance(s, int) for s in sizes):
        return int(max(sizes))
    return min(2 * layout.max_num_seqs, GRAPH_LIMIT)


def _ratio(new: float, old: float) -> float:
    return new / old if old > 0 else 1.0
