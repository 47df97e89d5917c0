"""What ``autotune log`` prints: the record, and which kinds of failure it speaks of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from autotune.records.observation import Failure, FailureKind

LOG_KINDS: frozenset[FailureKind] = frozenset(
    {
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
        "unknown",
    }
)
"""Kinds that ``autotune log`` speaks of; a trial knows more (``disk_full``), which are ``unknown`` there."""


@dataclass(frozen=True, kw_only=True)
class LastStats:
    """The newest stats line of each engine of the last server that printed any, put together."""

    prompt_tokens_per_s: float
    """Summed over engines, as are all but the shares."""
    output_tokens_per_s: float
    running: int | None
    waiting: int | None
    kv_usage: float | None
    """Largest over engines, 0..1."""
    prefix_hit_rate: float | None
    """Mean over engines, 0..1."""
    preemptions: int | None


@dataclass(frozen=True, kw_only=True)
class LogFailure:
    """What ended the last server of the log."""

    kind: FailureKind
    """One of ``LOG_KINDS``."""
    line: str
    hint: str | None


@dataclass(frozen=True, kw_only=True)
class LogSummary:
    """What a log says; ``None`` where it does not say it."""

    SCHEMA: ClassVar[str] = "autotune/log/1"

    file: str
    vllm_version: str | None
    engines: int
    """Different engines in the stats lines; 0 without any."""
    samples: int
    """Stats lines."""
    last: LastStats | None
    peak_output_tokens_per_s: float | None
    """Largest sum over engines at one time stamp."""
    max_kv_usage: float | None
    """Largest value of any line, 0..1."""
    kv_capacity_tokens: int | None
    """Summed over engines."""
    failure: LogFailure | None


def log_failure(failure: Failure) -> LogFailure:
    """A failure as the log reader tells it: this is the one place where kinds it does not speak of are ``unknown``."""
    kind: FailureKind = failure.kind if failure.kind in LOG_KINDS else "unknown"
    return LogFailure(kind=kind, line=failure.line, hint=failure.hint)
