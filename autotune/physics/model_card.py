"""The model card: what a ``config.json`` says about weights, KV cache and heads, without any weights.

Everything here is arithmetic on shapes. Biases and norms of heads are left out (below 0.1 % of the parameters).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from autotune.errors import InputError
from autotune.physics import attention, feedforward, states
from autotune.physics.blocks import Block, Kv, Weights
from autotune.physics.config_reader import ConfigReader
from autotune.physics.kv import kv_element_bytes
from autotune.physics.outside import outside_weights
from autotune.physics.quantization import Quantization, checkpoint_quantization, online_quantization

_ELEMENT_BYTES = {"float32": 4.0, "float": 4.0, "bfloat16": 2.0, "float16": 2.0, "half": 2.0}


@dataclass(frozen=True, kw_only=True)
class ModelCard:
    """One model's shapes. Bytes are bytes, counts are whole numbers."""

    name: str
    model_type: str
    blocks: tuple[Block, ...]
    """The layers in order."""
    outside: tuple[Weights, ...]
    """Embedding, output layer, vision tower and the like."""
    hidden_size: int
    vocab_size: int
    heads: int
    """Query heads; tensor parallelism must divide them."""
    kv_heads: int
    """KV heads of a full-attention layer (1 for a latent cache)."""
    head_dim: int
    intermediate_size: int
    """Of the dense feed-forward layers; 0 where all are mixtures of experts."""
    experts: int
    """Routed experts of a mixture layer, 0 for a dense model."""
    experts_per_token: int
    expert_intermediate_size: int
    """0 for a dense model."""
    latent_attention: bool
    """MLA: the KV cache is one latent vector, copied to every tensor-parallel GPU."""
    max_model_len: int
    """Longest context that vLLM accepts without an override, tokens."""
    tied: bool
    """Output layer and embedding share their weights."""
    element_bytes: float
    """Bytes of an unquantized weight and of an ``auto`` KV element."""
    quantization: Quantization | None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], name: str = "") -> ModelCard:
        """Read a Hugging Face config (nested ``text_config`` of multimodal models included).

        Raises:
            InputError: a key that the arithmetic needs is missing or no number; the message names it.
        """
        reader = ConfigReader(config, name)
        quantization = checkpoint_quantization(reader)
        blocks = tuple(_block(reader, kind, i, quantization) for i, kind in enumerate(attention.layer_kinds(reader)))
        hidden, outside = reader.integer("hidden"), outside_weights(reader)
        experts = feedforward.experts(reader)
        latent = attention.is_latent(reader)
        expert = feedforward.expert_size(reader) if experts else 0
        dense = any(weights.name == "mlp.up_proj" for block in blocks for weights in block.weights)
        return cls(
            name=reader.name,
            model_type=reader.model_type,
            blocks=blocks,
            outside=tuple(outside if quantization is None else [quantization.apply(w, None, hidden) for w in outside]),
            hidden_size=hidden,
            vocab_size=reader.integer("vocab"),
            heads=reader.integer("heads"),
            kv_heads=1 if latent else attention.kv_heads(reader),
            head_dim=attention.head_dim(reader),
            intermediate_size=feedforward.dense_size(reader, 0) if dense else 0,
            experts=experts,
            experts_per_token=min(experts, reader.integer("experts_per_token")) if experts else 0,
            expert_intermediate_size=expert,
            latent_attention=latent,
            max_model_len=reader.max_model_len,
            tied=reader.tied,
            element_bytes=2.0,
            quantization=quantization,
        )

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.blocks)

    @property
    def parameters(self) -> int:
        """All parameters, vision tower included, multi-token-prediction layers not."""
        return sum(weights.parameters for weights in self._all())

    @property
    def active_parameters(self) -> int:
        """Parameters that one token multiplies with: routed experts by their share, no embedding table, output
        layer included (as DeepSeek and OpenAI count)."""
        return round(sum(weights.parameters * weights.active for weights in self._all()))

    @property
    def kv_layers(self) -> int:
        """Layers with a KV cache that grows or a state."""
        return sum(1 for block in self.blocks if block.kv)

    @property
    def uniform(self) -> bool:
        """Every layer keeps every token (no window, no state): capacity in tokens needs no context length."""
        return all(kv.kind == "full" for block in self.blocks for kv in block.kv)

    def weight_bytes(self) -> int:
        """Bytes of all weights, as stored."""
        return round(sum(weights.bytes for weights in self._all()))

    def weight_bytes_per_gpu(self, tp: int, pp: int = 1, ep: bool = False, dp: int = 1) -> int:
        """Bytes of weights on the fullest GPU. KV projections are copied when ``tp`` exceeds the KV heads;
        experts are spread over ``tp * dp`` GPUs (``ep``: whole experts)."""
        outside = sum(weights.bytes_per_gpu(tp, dp, ep) for weights in self.outside)
        stages = [sum(_block_bytes(block, tp, dp, ep) for block in stage) for stage in self.stages(pp)]
        if pp == 1:
            return round(stages[0] + outside)
        embedding = sum(w.bytes_per_gpu(tp, dp, ep) for w in self.outside if w.name != "lm_head")
        head = outside - embedding or sum(w.bytes_per_gpu(tp) for w in self.outside if w.name == "embed_tokens")
        return round(max(stages[0] + embedding, stages[-1] + head, *stages))

    def kv_bytes_per_token(self, kv_dtype: str = "auto") -> float:
        """Bytes of KV that one more token of a long context takes, all heads, whole model: full-attention layers
        only (window layers hold no more than their window). A model without any counts its window layers."""
        return self.kv_bytes_per_token_per_gpu(1, kv_dtype)

    def kv_bytes_per_token_per_gpu(self, tp: int, kv_dtype: str = "auto", pp: int = 1) -> float:
        """The same on one GPU of ``tp``: KV heads are copied when there are fewer than GPUs, a latent cache always."""
        size = self.kv_element_bytes(kv_dtype)
        return max(self._growth(stage, size, tp) for stage in self.stages(pp))

    def kv_bytes(self, context_tokens: int, kv_dtype: str = "auto", tp: int = 1) -> float:
        """Bytes on one of ``tp`` GPUs that a request of ``context_tokens`` holds while it decodes, windows and
        states included, before rounding to blocks."""
        size = self.kv_element_bytes(kv_dtype)
        return sum(kv.bytes_per_request(context_tokens, size, tp) for block in self.blocks for kv in block.kv)

    def kv_element_bytes(self, kv_dtype: str = "auto") -> float:
        """Bytes of one KV element for a ``kv_cache_dtype``; ``auto`` follows the checkpoint's KV scales if any.

        Raises:
            InputError: not a ``kv_cache_dtype`` that is known.
        """
        if kv_dtype == "auto":
            brought = None if self.quantization is None else self.quantization.kv_bytes
            return brought or self.element_bytes
        return kv_element_bytes(kv_dtype)

    def tp_choices(self, largest: int) -> tuple[int, ...]:
        """Tensor-parallel sizes up to ``largest`` that divide the model."""
        return tuple(tp for tp in range(1, largest + 1) if self.tp_problem(tp) is None)

    def tp_problem(self, tp: int, dp: int = 1, ep: bool = False) -> str | None:
        """Why vLLM would refuse this tensor-parallel size; None when it divides the model."""
        if self.heads % tp:
            return f"{self.heads} attention heads are not divisible by tensor_parallel_size {tp}"
        states_heads = {kv.heads for block in self.blocks for kv in block.kv if not kv.latent and kv.kind != "state"}
        for heads in sorted(states_heads):
            if heads % tp and tp % heads:
                return f"{heads} KV heads and tensor_parallel_size {tp} do not divide each other"
        slices = [(self.intermediate_size, tp)]
        if self.experts and not ep:
            slices.append((self.expert_intermediate_size, tp * dp))
        aligned = 1 if self.quantization is None else self.quantization.aligned
        only_experts = self.quantization is not None and self.quantization.only_experts
        for size, parts in slices:
            if size % parts and not only_experts:
                return f"intermediate size {size} is not divisible by {parts} GPUs"
            if parts > 1 and (size // parts) % aligned:
                return (
                    f"intermediate size {size} over {parts} GPUs gives {size // parts}, which is no multiple of the "
                    f"checkpoint's quantization block of {aligned}"
                )
        return None

    def quantized(self, method: str | None, dtype: str | None = None) -> ModelCard:
        """The card under ``--quantization METHOD`` and ``--dtype``; a quantized checkpoint stays as it is.

        Raises:
            InputError: the method needs a checkpoint made for it, or the type is not known.
        """
        wide = self.element_bytes if dtype in (None, "", "auto") else _dtype_bytes(str(dtype))
        card = self if wide == self.element_bytes else self._stored(None, wide)
        if self.quantization is not None or method in (None, "", "auto", "none"):
            return card
        return card.requantized(online_quantization(str(method)))

    def requantized(self, quantization: Quantization) -> ModelCard:
        """The card of a 16-bit model with its matrices stored so."""
        return self._stored(quantization, self.element_bytes)

    def _stored(self, quantization: Quantization | None, wide: float) -> ModelCard:
        def change(weights: Weights, layer: int | None) -> Weights:
            if weights.bytes_each != self.element_bytes:  # quantized in the checkpoint
                return weights
            plain = dataclasses.replace(weights, bytes_each=wide)
            return plain if quantization is None else quantization.apply(plain, layer, self.hidden_size)

        blocks = tuple(
            dataclasses.replace(block, weights=tuple(change(w, i) for w in block.weights))
            for i, block in enumerate(self.blocks)
        )
        outside = tuple(change(weights, None) for weights in self.outside)
        kept = quantization or self.quantization
        return dataclasses.replace(self, blocks=blocks, outside=outside, quantization=kept, element_bytes=wide)

    def _all(self) -> Iterable[Weights]:
        for block in self.blocks:
            yield from block.weights
        yield from self.outside

    def stages(self, pp: int) -> list[tuple[Block, ...]]:
        """Layers of each pipeline stage: even, the remainder to the stages before the last (vLLM get_pp_indices)."""
        base, rest = divmod(len(self.blocks), pp)
        sizes = [base] * pp
        for i in range(2, rest + 2):
            sizes[-i] += 1
        starts = [sum(sizes[:i]) for i in range(pp)]
        return [self.blocks[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    def _growth(self, stage: tuple[Block, ...], size: float, tp: int) -> float:
        kvs = [kv for block in stage for kv in block.kv if kv.kind != "state"]
        full = [kv for kv in kvs if kv.kind == "full"]
        return sum(kv.bytes_per_token(size, tp) for kv in full or kvs)


def _block(reader: ConfigReader, kind: str, index: int, quantization: Quantization | None) -> Block:
    reader = reader.layer(index)
    hidden = reader.integer("hidden")
    weights: list[Weights] = [Weights(name="norms", parameters=2 * hidden, shard="replicated", linear=False)]
    kvs: tuple[Kv, ...] = ()
    if kind in ("full", "sliding", "chunked", "both"):
        part, kvs = attention.attention(reader, "full" if kind == "both" else kind, index)
        weights += part
    if kind in ("linear", "both"):
        part, kept = states.state_layer(reader)
        weights, kvs = weights + part, kvs + kept
    if kind in ("mlp", "moe") or not reader.is_type("nemotron_h"):  # its layers are either mixer or feed-forward
        weights += feedforward.feed_forward(reader, index, kind)
    if quantization is not None:
        weights = [quantization.apply(w, index, hidden) for w in weights]
    return Block(weights=tuple(weights), kv=kvs)


def _block_bytes(block: Block, tp: int, dp: int, ep: bool) -> float:
    return sum(weights.bytes_per_gpu(tp, dp, ep) for weights in block.weights)


def _dtype_bytes(dtype: str) -> float:
    if dtype not in _ELEMENT_BYTES:
        raise InputError(f"dtype must be one of {', '.join(sorted(_ELEMENT_BYTES))}, got {dtype!r}")
    return _ELEMENT_BYTES[dtype]
