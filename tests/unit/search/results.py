"""Trial results made by hand."""

from __future__ import annotations

from typing import Any

from autotune.records.measurement import Measurement
from autotune.records.observation import Capacity, ClientStats, Failure
from autotune.records.settings import Settings
from autotune.records.trial import TrialResult

CLIENT = ClientStats(cpu_s=0.1, loop_lag_p99_s=0.001, in_flight_min=8, in_flight_max=8)


def load(concurrency: int, rate: float | None, **changes: Any) -> Measurement:
    values: dict[str, Any] = {
        "concurrency": concurrency,
        "outcome": "steady",
        "valid": True,
        "invalid_reasons": (),
        "stable": True,
        "violations": {"failed_requests": -0.01, "kv": -0.5},
        "output_tokens_per_s": rate,
        "paired_low": None if rate is None else rate * 0.98,
        "paired_high": None if rate is None else rate * 1.02,
        "low": None if rate is None else rate * 0.95,
        "high": None if rate is None else rate * 1.05,
        "prompt_tokens_per_s": 10.0,
        "kv_usage_mean": 0.4,
        "kv_usage_max": 0.5,
        "running_mean": float(concurrency),
        "waiting_mean": 0.0,
        "preemptions": 0,
        "finished_requests": 30,
        "failed_requests": 0,
        "errors": {},
        "truncated_share": 0.0,
        "prefix_hit_share": 0.0,
        "mean_output_tokens": 50.0,
        "window_start_s": 5.0,
        "window_s": 20.0,
        "load_s": 25.0,
        "client": CLIENT,
        **changes,
    }
    return Measurement(**values)


def result(number: int, rate: float | None, **changes: Any) -> TrialResult:
    good = rate is not None
    values: dict[str, Any] = {
        "number": number,
        "kind": "search",
        "state": "COMPLETE" if good else "PRUNED",
        "settings": Settings(max_num_seqs=8 + number),
        "loads": (load(8, rate),) if good else (),
        "best": 0 if good else None,
        "startup_s": 30.0,
        "total_s": 60.0,
        "capacity": Capacity(kv_tokens=1000, engines=1, max_model_len=512, max_num_seqs=8, source="log"),
        "failure": None if good else Failure(kind="kv_too_small", line="too small", hint="less"),
        "argv": ("vllm", "serve", "m", "--max-num-seqs", str(8 + number)),
        "objective": 1000.0 / rate if rate is not None else None,
        **changes,
    }
    return TrialResult(**values)
