"""What goes into a simulated engine and comes out of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

NOISE_EVERY_S = 1.0
"""A noise hook is asked again after so many seconds."""


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """What one engine may hold and do in a step."""

    kv_tokens: int
    """KV cache of this engine, tokens."""
    max_num_seqs: int = 1024
    max_num_batched_tokens: int = 8192
    block_size: int = 16
    hit_share: float = 0.0
    """Share of a preempted sequence's tokens that the prefix cache still holds when it comes back, 0..1."""
    recompute_factor: float = 1.0
    """Cost of a token that is computed again over that of a prompt's (steps out of CUDA graphs, long contexts)."""


@dataclass(frozen=True, kw_only=True)
class SimRequest:
    """One request whose answer's length is known."""

    id: str
    prompt_tokens: int
    """Tokens that are computed before the first new one: the prompt, and an answer so far that is sent along."""
    output_tokens: int
    """Tokens that are written."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """One answer that ended."""

    request: SimRequest
    sent_s: float
    started_s: float
    """First admission."""
    ended_s: float
    preemptions: int
    engine: int = 0


class Live:
    """A request inside the engine."""

    __slots__ = ("begun", "computed", "gone", "left", "offset", "preempted", "request", "sent", "todo", "tokens")

    def __init__(self, request: SimRequest, sent: float) -> None:
        self.request = request
        self.sent = sent
        self.begun = math.nan
        self.tokens = request.prompt_tokens  # to compute before the next new token
        self.left = request.output_tokens  # while decoding: the stamp of the step counter at which it ends
        self.todo = 0  # of ``tokens``, not computed yet
        self.computed = 0  # of ``tokens``, in the cache
        self.offset: int | None = None  # cached tokens less the step counter; None: not decoding
        self.preempted = 0
        self.gone = False


Noise = Callable[[], float]
"""Factor on the duration of the steps of the next second."""
