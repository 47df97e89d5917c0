"""How vLLM cuts a GPU's KV memory into blocks, and how many tokens that holds.

After ``v1/core/kv_cache_utils.py`` of vLLM 0.22 (``_get_kv_cache_groups_uniform_page_size``,
``get_max_concurrency_for_kv_cache_config``): layers of one kind form one group; layers of several kinds are cut
into groups of equal length (padded) that draw blocks from one pool, so that window layers hold no more than
their window and state layers one block. Capacity in tokens is requests of ``max_model_len`` times their length.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.errors import InputError
from autotune.physics.blocks import Block, Kv

# Bytes per element of the kv_cache_dtype values that vLLM 0.11 to 0.33 know; per-head scales are below 4 %.
_KV_ELEMENT_BYTES = {
    "bfloat16": 2.0,
    "float16": 2.0,
    "float32": 4.0,
    "fp8": 1.0,
    "fp8_e4m3": 1.0,
    "fp8_e5m2": 1.0,
    "fp8_inc": 1.0,
    "fp8_per_token_head": 1.0,
    "int8_per_token_head": 1.0,
    "int4_per_token_head": 0.5,
    "nvfp4": 0.5 + 1 / 16,
    "fp8_ds_mla": 656 / 576,
}


def kv_element_bytes(kv_dtype: str) -> float:
    """Bytes of one KV element for a ``kv_cache_dtype``.

    Raises:
        InputError: not a type that is known.
    """
    if kv_dtype not in _KV_ELEMENT_BYTES:
        known = ", ".join(sorted(_KV_ELEMENT_BYTES))
        raise InputError(f"kv_cache_dtype {kv_dtype!r} is not known", hint=f"known are auto, {known}")
    return _KV_ELEMENT_BYTES[kv_dtype]


@dataclass(frozen=True, kw_only=True)
class KvGroup:
    """Layers that share a block table; ``copies`` groups of this kind."""

    kv: Kv
    block_tokens: int
    """Tokens in one block of it."""
    copies: int

    def blocks(self, context: int, in_flight: int) -> int:
        """Blocks of a request of ``context`` tokens with up to ``in_flight`` tokens of one batch on top of a window."""
        if self.kv.kind == "state":
            return self.copies
        if self.kv.kind == "full":
            return self.copies * math.ceil(context / self.block_tokens)
        extra = 1 if self.kv.kind == "sliding" else 0  # a window need not begin with a block
        held = self.kv.window - extra + in_flight
        return self.copies * (math.ceil(min(held, context) / self.block_tokens) + extra)


@dataclass(frozen=True, kw_only=True)
class KvPool:
    """One engine's pool of blocks."""

    groups: tuple[KvGroup, ...]
    bytes_per_block: float
    """On one GPU, over the layers of one group."""
    context_parallel: int = 1
    """Decode-context-parallel GPUs, each of which holds its part of a context."""

    def blocks_per_request(self, context: int, in_flight: int = 0) -> int:
        """Blocks that one request of ``context`` tokens needs."""
        part = math.ceil(context / self.context_parallel)
        return max(1, sum(group.blocks(part, in_flight) for group in self.groups))

    def blocks(self, available_bytes: float) -> int:
        """Blocks that fit into ``available_bytes`` of one GPU."""
        if self.bytes_per_block <= 0:
            return 1
        return max(0, int(available_bytes // self.bytes_per_block))

    def tokens(self, blocks: int, context: int, in_flight: int = 0) -> int:
        """Tokens of requests of ``context`` tokens each that ``blocks`` hold: what vLLM logs for max_model_len."""
        return int(blocks / self.blocks_per_request(context, in_flight) * context)

    def longest(self, blocks: int, limit: int, in_flight: int = 0) -> int:
        """Largest context up to ``limit`` of which one request fits; 0 when not even one token does."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks_per_request(middle, in_flight) <= blocks:
                low = middle
            else:
                high = middle - 1
        return low


def kv_pool(
    stage: Sequence[Block],
    *,
    element_bytes: float,
    tp: int = 1,
    block_size: int = 16,
    context_parallel: int = 1,
    windows: bool = True,
) -> KvPool:
    """The pool of the GPUs that hold the layers of ``stage``; without ``windows`` (the hybrid manager is off) window
    layers keep every token."""
    kinds = Counter(kv if windows else _unwindowed(kv) for block in stage for kv in block.kv)
    if not kinds:
        return KvPool(groups=(), bytes_per_block=0.0)
    if len({(kv.kind, kv.window) for kv in kinds}) == 1 and not any(kv.kind == "state" for kv in kinds):
        page = sum(kv.bytes_per_token(element_bytes, tp) * count for kv, count in kinds.items()) * block_size
        group = KvGroup(kv=next(iter(kinds)), block_tokens=block_size, copies=1)
        return KvPool(groups=(group,), bytes_per_block=page, context_parallel=context_parallel)
    return _mixed(kinds, element_bytes, tp, block_size, context_parallel)


def _unwindowed(kv: Kv) -> Kv:
    return kv if kv.kind == "state" else dataclasses.replace(kv, kind="full", window=0)


def _mixed(kinds: Counter[Kv], size: float, tp: int, block_size: int, context_parallel: int) -> KvPool:
    states = [kv.bytes_per_request(1, size, tp) for kv in kinds if kv.kind == "state"]
    tokens = {kv: kv.bytes_per_token(size, tp) for kv in kinds if kv.kind != "state"}
    if states and tokens:  # vLLM enlarges attention blocks until one holds a state
        block_size = max(block_size, 16 * math.ceil(max(states) / max(tokens.values()) / 16))
    page = max([*states, *(per_token * block_size for per_token in tokens.values())])
    counts = list(kinds.values())
    length = max(counts) if max(counts) < 1.5 * min(counts) else min(counts)
    groups = []
    for kv, count in kinds.items():
        block_tokens = block_size
        if kv in tokens and page % (tokens[kv] * block_size) == 0:
            block_tokens = round(page / tokens[kv])
        groups.append(KvGroup(kv=kv, block_tokens=block_tokens, copies=math.ceil(count / length)))
    return KvPool(groups=tuple(groups), bytes_per_block=length * page, context_parallel=context_parallel)
