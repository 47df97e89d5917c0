"""What one load is worth: validity before value, stability beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from autotune.records.observation import ClientStats, Failure

Outcome = Literal["steady", "saturated", "not_settled", "invalid", "failed"]
"""``steady``: a rate that may be compared; ``saturated``: preemption or a full KV cache, judged but never
compared with steady ones; ``not_settled``: no steady window within its limit; ``invalid``: the reading
cannot be trusted; ``failed``: the server failed under this load."""

BottleneckKind = Literal["kv", "sequences", "client", "prefill", "bandwidth", "compute", "server_cpu"]


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """What limits the throughput, with its evidence and the knob that would move it."""

    kind: BottleneckKind
    evidence: str
    knob: str | None = None


Constants = Literal["fitted", "physics", "shape"]
"""Where the step model's cost of a cached token comes from: windows of this server, what the model and the GPU
say, or the usual shape of a step."""


@dataclass(frozen=True, kw_only=True)
class KvCorrection:
    """From the context that the window held to that of a long run."""

    factor: float
    """Corrected over measured tokens/s."""
    factor_sd: float
    """Standard deviation of the factor's logarithm."""
    window_tokens_per_s: float
    """As the counter showed it, summed over engines."""
    window_kv_tokens: float
    """Cached tokens, mean of the window, summed over engines."""
    long_run_kv_tokens: float
    constants: Constants


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Latency quantiles over the answers of the window, seconds; only when streamed."""

    ttft_p50_s: float | None
    """Of requests sent inside the window; ``None``: there was none."""
    ttft_p99_s: float | None
    tpot_p50_s: float
    """Time per output token after the first."""
    tpot_p99_s: float


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One load inside one server life, judged."""

    concurrency: int
    outcome: Outcome
    valid: bool
    invalid_reasons: tuple[str, ...]
    stable: bool
    violations: Mapping[str, float]
    """Dimensionless, one per stability rule: at most 0 is fine."""
    output_tokens_per_s: float | None
    """Window mean from the server's counter, summed over engines, corrected where ``correction`` says so;
    ``None``: no steady window."""
    paired_low: float | None
    """95 % interval given the lengths: for comparisons."""
    paired_high: float | None
    low: float | None
    """95 % interval with the error of the lengths: for forecasts."""
    high: float | None
    prompt_tokens_per_s: float | None
    kv_usage_mean: float | None
    kv_usage_max: float | None
    running_mean: float | None
    waiting_mean: float | None
    preemptions: int | None
    """In the window."""
    finished_requests: int
    """Answers that ended during the whole load."""
    failed_requests: int
    errors: Mapping[str, int]
    """Failed requests by kind."""
    truncated_share: float | None
    """Answers that ended at the output limit, of those that ended; ``None`` when lengths are forced."""
    prefix_hit_share: float | None
    mean_output_tokens: float | None
    """Of the answers that ended (biased low: long ones are still running)."""
    window_start_s: float | None
    window_s: float | None
    load_s: float
    """Length of the whole load."""
    client: ClientStats
    bottleneck: Bottleneck | None = None
    latency: Latency | None = None
    correction: KvCorrection | None = None
    """``None``: the number is the counter's own."""
    failure: Failure | None = None
    notes: tuple[str, ...] = field(default=())
