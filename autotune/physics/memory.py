"""KV-cache capacity of a set of flags, and whether they fit at all, before any server is started.

    KV bytes of a GPU = utilization x total - weights / TP - overhead

The overhead (peak activations, sampler, CUDA graphs, libraries) has a prior from shapes; every launch that reports
its capacity corrects it. Measured on H200, vLLM 0.22.1, Qwen3-32B: within 0.3 % of the four capacities seen.
Not in the prior: profiling of vision encoders, LoRA adapters, draft models of speculative decoding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.physics.gpus import GIB, Hardware
from autotune.physics.kv import KvPool, kv_pool
from autotune.physics.layout import Layout, read_layout
from autotune.physics.model_card import ModelCard
from autotune.physics.rules import Rules, rules_for

_LIBRARY_BYTES = round(0.15 * GIB)  # CUDA modules and workspaces that are not the allocator's
_GRAPH_BYTES = round(0.40 * GIB)  # vLLM's own estimates in logs: 0.26 to 0.83 GiB
_NCCL_BYTES = round(1.3 * GIB)  # where counted: the rest of 7.9 GiB that 0.10.0 kept at TP 8
_PRIOR_SD = 0.75 * GIB
_LAUNCH_SD = 0.15 * GIB


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """Memory of the fullest GPU, bytes."""

    total: int
    requested: int
    """What the server may use: utilization x total."""
    weights: int
    overhead: int
    """Activations, sampler, graphs, libraries."""
    kv: int
    """Left for the KV cache (below zero: missing)."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Whether a server with these flags can start, and what it can hold."""

    fits: bool
    reason: str | None
    """Why not."""
    engines: int
    kv_capacity_tokens: int
    """Summed over engines, as vLLM logs it: requests of max_model_len that fit, times max_model_len (0: none)."""
    max_model_len: int
    longest_model_len: int
    """Largest max_model_len that these flags could serve (0: none)."""
    breakdown: Breakdown
    pool: KvPool | None = None
    blocks: int = 0
    """Of one engine."""

    def kv_capacity_at(self, context_tokens: int) -> int:
        """Tokens that the engines hold in requests of ``context_tokens`` while they decode. Equal to
        ``kv_capacity_tokens`` up to rounding unless layers have windows or states, which hold no more as a
        context grows (vLLM's own number reserves a whole batch on top of each window)."""
        if self.pool is None or not self.fits:
            return 0
        return self.engines * self.pool.tokens(self.blocks, max(1, context_tokens))


@dataclass(frozen=True, kw_only=True)
class MemoryModel:
    """The prior of one vLLM version, corrected by what launches showed. Immutable: ``observe`` gives a new one."""

    version: str | None = None
    """vLLM's version; None: not known."""
    residuals: tuple[float, ...] = ()
    """Overhead seen less overhead expected, bytes per GPU, one a launch."""

    @property
    def rules(self) -> Rules:
        """How this version counts."""
        return rules_for(self.version)

    @property
    def correction_bytes(self) -> float:
        """Mean residual shrunk towards 0: prior sd 0.75 GiB, launch-to-launch sd 0.15 GiB (judgement)."""
        return sum(self.residuals) / (len(self.residuals) + (_LAUNCH_SD / _PRIOR_SD) ** 2)

    def overhead_bytes(self, card: ModelCard, hardware: Hardware, settings: Mapping[str, object]) -> int:
        """Bytes of the fullest GPU that are neither weights nor KV cache."""
        layout = read_layout(settings, card, hardware.gpu, self.rules)
        return max(0, round(self._prior(card, hardware, layout) + self.correction_bytes))

    def observe(
        self, card: ModelCard, hardware: Hardware, settings: Mapping[str, object], kv_capacity_tokens: int
    ) -> MemoryModel:
        """Learn from a launch that reported ``kv_capacity_tokens`` (summed over engines). A capacity that was set
        by hand, or of a layout that should not even start, teaches nothing."""
        card = adjusted(card, settings)
        layout = read_layout(settings, card, hardware.gpu, self.rules)
        by_hand = layout.kv_cache_memory_bytes is not None or layout.num_gpu_blocks is not None
        if by_hand or kv_capacity_tokens < 1 or not card.kv_layers or _shape_problem(card, hardware, layout):
            return self
        pool, in_flight = _pool(card, layout), _in_flight(layout, self.rules)
        requests = kv_capacity_tokens / layout.dp / layout.max_model_len
        seen = requests * pool.blocks_per_request(layout.max_model_len, in_flight) * pool.bytes_per_block
        budget = layout.gpu_memory_utilization * hardware.gpu.memory_bytes - _weights(card, layout)
        residual = budget - seen - self._prior(card, hardware, layout)
        return dataclasses.replace(self, residuals=(*self.residuals, residual))

    def _prior(self, card: ModelCard, hardware: Hardware, layout: Layout) -> float:
        rules = self.rules
        sampler = layout.max_num_seqs * card.vocab_size * rules.sampler_bytes_per_logit
        hidden = layout.max_num_batched_tokens * card.hidden_size * card.element_bytes
        forward = layout.max_num_batched_tokens * _activation_bytes(card, layout)
        graphs = _GRAPH_BYTES if rules.counts_graphs and not layout.eager else 0
        nccl = _NCCL_BYTES if rules.counts_nccl and layout.engine_gpus > 1 else 0
        return max(forward, sampler + hidden) + _LIBRARY_BYTES + graphs + nccl


def fits(card: ModelCard, hardware: Hardware, settings: Mapping[str, object], memory: MemoryModel | None = None) -> Fit:
    """Whether a server of ``card`` with these flags would start on ``hardware``, by vLLM's own rules.

    It starts when TP x PP x DP cards are there, the layout divides the model, the asked share of each card is free,
    and one request of ``max_model_len`` fits into the KV cache.

    Raises:
        InputError: a flag that is no number where one is needed, an unknown type or quantization.
    """
    memory = memory or MemoryModel()
    card = adjusted(card, settings)
    layout = read_layout(settings, card, hardware.gpu, memory.rules)
    total = hardware.gpu.memory_bytes
    requested = math.ceil(layout.gpu_memory_utilization * total)
    problem = _shape_problem(card, hardware, layout)
    if problem is not None:
        empty = Breakdown(total=total, requested=requested, weights=0, overhead=0, kv=0)
        return _refused(problem, layout, empty, 0)
    weights, overhead = _weights(card, layout), memory.overhead_bytes(card, hardware, settings)
    kv = layout.kv_cache_memory_bytes
    kv = requested - weights - overhead if kv is None else kv
    breakdown = Breakdown(total=total, requested=requested, weights=weights, overhead=overhead, kv=kv)
    pool, in_flight = _pool(card, layout), _in_flight(layout, memory.rules)
    blocks = pool.blocks(kv) if layout.num_gpu_blocks is None else layout.num_gpu_blocks
    longest = pool.longest(blocks, max(card.max_model_len, layout.max_model_len), in_flight)
    length = min(layout.max_model_len, longest) if layout.fitted_len else layout.max_model_len
    problem = _memory_problem(hardware, layout, breakdown, length, longest)
    if problem is not None:
        return _refused(problem, layout, breakdown, longest)
    return Fit(
        fits=True,
        reason=None,
        engines=layout.dp,
        kv_capacity_tokens=layout.dp * pool.tokens(blocks, length, in_flight),
        max_model_len=length,
        longest_model_len=longest,
        breakdown=breakdown,
        pool=pool,
        blocks=blocks,
    )


def adjusted(card: ModelCard, settings: Mapping[str, object]) -> ModelCard:
    """The card as these flags load it (``quantization``, ``dtype``)."""
    method, dtype = settings.get("quantization"), settings.get("dtype")
    return card.quantized(None if method is None else str(method), None if dtype is None else str(dtype))


def _refused(reason: str, layout: Layout, breakdown: Breakdown, longest: int) -> Fit:
    return Fit(
        fits=False,
        reason=reason,
        engines=layout.dp,
        kv_capacity_tokens=0,
        max_model_len=layout.max_model_len,
        longest_model_len=longest,
        breakdown=breakdown,
    )


def _shape_problem(card: ModelCard, hardware: Hardware, layout: Layout) -> str | None:
    if layout.gpus > hardware.count:
        return f"TP {layout.tp} x PP {layout.pp} x DP {layout.dp} needs {layout.gpus} GPUs, there are {hardware.count}"
    if layout.pp > card.layers:
        return f"{card.layers} layers cannot be spread over {layout.pp} pipeline stages"
    if layout.expert_parallel and not card.experts:
        return "expert parallelism needs a model with experts"
    if layout.max_model_len > card.max_model_len and not layout.scaled:
        return f"max_model_len {layout.max_model_len} is longer than the model's {card.max_model_len}"
    if layout.max_num_batched_tokens < layout.max_num_seqs:
        return (
            f"max_num_batched_tokens {layout.max_num_batched_tokens} must be at least max_num_seqs "
            f"{layout.max_num_seqs}"
        )
    if layout.context_parallel > 1 and not card.latent_attention and layout.tp <= card.kv_heads:
        return f"decode context parallelism needs a TP above the {card.kv_heads} KV heads"
    return card.tp_problem(layout.tp, layout.dp, layout.expert_parallel)


def _memory_problem(hardware: Hardware, layout: Layout, breakdown: Breakdown, length: int, longest: int) -> str | None:
    free = hardware.free_bytes
    if free < breakdown.requested and layout.kv_cache_memory_bytes is None:
        share = math.floor(100 * free / hardware.gpu.memory_bytes) / 100
        return (
            f"{free / GIB:.1f} GiB of each card are free, gpu_memory_utilization {layout.gpu_memory_utilization} asks "
            f"for {breakdown.requested / GIB:.1f} GiB: at most {share:.2f} would start"
        )
    if layout.kv_cache_memory_bytes is not None and breakdown.weights + breakdown.overhead + breakdown.kv > free:
        return f"kv_cache_memory_bytes and weights need more than the {free / GIB:.1f} GiB that are free"
    if breakdown.kv <= 0:
        return (
            f"weights of {breakdown.weights / GIB:.1f} GiB and {breakdown.overhead / GIB:.1f} GiB of activations leave "
            f"nothing of {breakdown.requested / GIB:.1f} GiB for the KV cache"
        )
    if length > longest or longest == 0:
        return (
            f"one request of max_model_len {length} does not fit: {breakdown.kv / GIB:.2f} GiB of KV cache hold "
            f"{longest} tokens"
        )
    return None


def _weights(card: ModelCard, layout: Layout) -> int:
    return card.weight_bytes_per_gpu(layout.tp, layout.pp, layout.expert_parallel, layout.dp)


def _pool(card: ModelCard, layout: Layout) -> KvPool:
    """The pool of the pipeline stage that holds the fewest requests."""
    pools = [
        kv_pool(
            stage,
            element_bytes=card.kv_element_bytes(layout.kv_cache_dtype),
            tp=layout.tp,
            block_size=layout.block_size,
            context_parallel=layout.context_parallel,
            windows=layout.windows,
        )
        for stage in card.stages(layout.pp)
    ]
    return max(pools, key=lambda pool: pool.bytes_per_block * pool.blocks_per_request(layout.max_model_len))


def _in_flight(layout: Layout, rules: Rules) -> int:
    return layout.max_num_batched_tokens * rules.batches_in_flight


def _activation_bytes(card: ModelCard, layout: Layout) -> float:
    """Largest set of tensors that live together in one layer of a forward pass, bytes per token."""
    element, tp = card.element_bytes, layout.tp
    stream = 2 * card.hidden_size * element  # hidden state and residual
    dense = 3 * card.intermediate_size / tp * element  # gate and up, and their product
    keys = card.heads / tp if card.latent_attention else max(1.0, card.kv_heads / tp)  # MLA expands for prefill
    attention = (2 * card.heads / tp + 2 * keys) * card.head_dim * element
    routed = 0.0
    if card.experts:  # vLLM's fused experts: two caches per chosen expert
        width = card.expert_intermediate_size / (1 if layout.expert_parallel else tp * layout.dp)
        routed = card.experts_per_token * (max(2 * width, card.hidden_size) + width) * element
    return stream + max(dense, attention, routed)
