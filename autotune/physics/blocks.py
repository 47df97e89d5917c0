"""What a model is made of: kinds of weights, what a layer keeps per token, and layers that hold both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Shard = Literal["tp", "heads", "experts", "replicated"]
"""How vLLM spreads a weight: over the tensor-parallel GPUs; over them but never below one KV head each;
over the GPUs of all data-parallel engines (experts); or a copy on each."""

KvKind = Literal["full", "sliding", "chunked", "state"]
"""``full``: every token of the context; ``sliding``: the last ``window`` tokens; ``chunked``: the current
chunk of ``window`` tokens; ``state``: a fixed size per request, whatever its length."""


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Tensors of one layer that are spread and quantized alike."""

    name: str
    """Module path below the layer, as in the checkpoint: ``self_attn.q_proj``."""
    parameters: int
    shard: Shard = "tp"
    units: int = 0
    """KV heads (``heads``) or experts (``experts``) that the weight divides into."""
    linear: bool = True
    """A matrix that quantization reaches; norms, embeddings, routers and output layers stay as they are."""
    active: float = 1.0
    """Share that one token multiplies with."""
    bytes_each: float = 2.0
    """Bytes per parameter, scales included."""
    padded: float = 1.0
    """What a GPU holds over what the checkpoint has."""

    @property
    def bytes(self) -> float:
        """Bytes in the checkpoint."""
        return self.parameters * self.bytes_each

    def bytes_per_gpu(self, tp: int, dp: int = 1, ep: bool = False) -> float:
        """Bytes on the fullest GPU of a TP x DP layout."""
        return self.bytes * self.padded * self.share(tp, dp, ep)

    def share(self, tp: int, dp: int, ep: bool) -> float:
        """Part of it that the fullest GPU of a TP x DP layout holds."""
        if self.shard == "replicated":
            return 1.0
        if self.shard == "heads":
            return max(1, -(-self.units // tp)) / self.units
        if self.shard == "experts":
            # vLLM spreads experts over TP x DP, whole ones with expert parallelism, slices of all without
            # (FusedMoEParallelConfig.make, flatten_tp_across_dp_and_pcp).
            gpus = tp * dp
            return -(-self.units // gpus) / self.units if ep else 1.0 / gpus
        return 1.0 / tp


@dataclass(frozen=True, kw_only=True)
class Kv:
    """What one layer keeps of each request."""

    kind: KvKind
    heads: int = 1
    width: int = 0
    """Elements of key and value per head and token."""
    window: int = 0
    """Tokens of a sliding window or a chunk."""
    latent: bool = False
    """MLA: one latent vector for all heads, copied to every tensor-parallel GPU."""
    extra_bytes: int = 0
    """Bytes per token beside keys and values (the indexer of sparse MLA), copied to every GPU."""
    state_elements: int = 0
    """Elements of a constant state, in the model's type, divided by TP."""
    state_bytes: int = 0
    """Bytes of a constant state of fixed type, divided by TP."""

    def bytes_per_token(self, element_bytes: float, tp: int = 1) -> float:
        """Bytes per token on one of ``tp`` GPUs; 0 for a constant state."""
        if self.kind == "state":
            return 0.0
        heads = self.heads if self.latent else max(1, -(-self.heads // tp))
        return heads * self.width * element_bytes + self.extra_bytes

    def bytes_per_request(self, context: int, element_bytes: float, tp: int = 1) -> float:
        """Bytes of a request of ``context`` tokens while it decodes, without block rounding, on one GPU."""
        if self.kind == "state":
            return (self.state_elements * 2.0 + self.state_bytes) / tp
        held = context if self.kind == "full" else min(context, self.window)
        return held * self.bytes_per_token(element_bytes, tp)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One layer: its weights and what it keeps of each request (nothing, or two things in parallel hybrids)."""

    weights: tuple[Weights, ...]
    kv: tuple[Kv, ...] = ()
