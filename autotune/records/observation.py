"""What one load inside one server life showed; never raised, always recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

FailureKind = Literal[
    "oom",
    "kv_too_small",
    "no_kv_memory",
    "gpu_busy",
    "port_in_use",
    "bad_flag",
    "tp_not_divisible",
    "not_enough_gpus",
    "max_model_len_too_long",
    "gated_model",
    "model_not_found",
    "nccl",
    "engine_died",
    "unsupported",
    "stalled",
    "start_timeout",
    "disk_full",
    "interrupted",
    "unknown",
]
"""Kinds of failure. The log reader (``autotune log``) uses those from ``oom`` to ``unsupported`` and
``unknown``; ``stalled``, ``start_timeout``, ``disk_full`` and ``interrupted`` come from outside the log."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a server ended or a load could not be measured."""

    kind: FailureKind
    line: str
    """The line of the log (or the observation) that says so."""
    hint: str | None = None
    """What to do about it."""
    log_path: str | None = None
    """The log it was read from, relative to the study folder where there is one."""


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """What the running server can hold."""

    kv_tokens: int | None
    """KV cache, tokens, summed over engines."""
    engines: int
    """Engine processes (data-parallel ranks)."""
    max_model_len: int | None
    max_num_seqs: int | None
    """Sequence limit of one engine."""
    source: Literal["log", "metrics", "model"]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One reading of the server's own counters."""

    t_s: float
    """Seconds since the first send."""
    running: int | None
    waiting: int | None
    kv_usage: float | None
    """Largest over engines, 0..1."""
    generation_tokens: int | None
    """Counter, summed over engines, as are the following."""
    prompt_tokens: int | None
    preemptions: int | None
    prefix_queries: int | None
    prefix_hits: int | None


ErrorKind = Literal["connect", "server", "client", "timeout", "incomplete"]
"""``connect``: no connection or it broke; ``server``: 5xx or an error inside the answer; ``client``: 4xx;
``timeout``: over the request limit; ``incomplete``: an answer without an end."""


@dataclass(frozen=True, kw_only=True)
class RequestError:
    """Why one request failed."""

    kind: ErrorKind
    message: str


@dataclass(frozen=True, kw_only=True)
class RequestOutcome:
    """One request as the client saw it."""

    id: str
    sent_s: float
    ended_s: float | None
    """``None``: still in flight at the end of the observation, then cancelled."""
    prompt_tokens: int | None
    """From ``usage``; includes the answer so far that was sent along."""
    output_tokens: int | None
    """From ``usage``."""
    finish_reason: str | None
    error: RequestError | None = None
    ttft_s: float | None = None
    """Time to first token, only when streamed; also of a request that is still in flight at the end."""
    itl_s: float | None = None
    """Mean time between chunks after the first, only when streamed."""
    text: str | None = None
    """The answer, kept only where the plan asks for answers."""


@dataclass(frozen=True, kw_only=True)
class ClientStats:
    """What the load generator itself did: the proof that it was not the limit."""

    cpu_s: float
    """CPU seconds of the client while loading."""
    loop_lag_p99_s: float
    """99th percentile of the event loop's lateness."""
    in_flight_min: int
    """Fewest requests in flight between the first send and the drain."""
    in_flight_max: int


@dataclass(frozen=True, kw_only=True)
class Observation:
    """One load in one server life."""

    SCHEMA: ClassVar[str] = "autotune/observation/1"

    t_s: float
    """Seconds since the first send: the only clock a stop rule may use."""
    concurrency: int
    samples: tuple[Sample, ...]
    requests: tuple[RequestOutcome, ...]
    client: ClientStats
    end: str
    """``stopped:<reason>``, ``drained``, ``engine_died``, ``stalled``, ``limit`` or ``running``."""
    failure: Failure | None = None


StopRule = Callable[[Observation], str | None]
"""Asked at every sample with the observation so far; a reason ends the load. Pure."""
