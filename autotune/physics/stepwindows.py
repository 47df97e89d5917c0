"""Measured loads as rows of a step model's fit: what one engine held, and how fast it was."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.physics.stepfit import StepWindow
from autotune.records.measurement import Measurement
from autotune.records.observation import Capacity

ROW_S = 10.0
"""A window of so many seconds counts once in a fit."""


def window_of(load: Measurement, capacity: Capacity) -> StepWindow | None:
    """One load as a window of one engine; ``None`` where it is not steady, or the server did not say what it held.

    The rate is the counter's own, not the corrected one: a fit wants the rate that goes with the context held.
    """
    rate, running = load.output_tokens_per_s, load.running_mean
    if load.outcome != "steady" or not load.valid or not rate or not running:
        return None
    if load.correction is not None:
        rate, kv_tokens = load.correction.window_tokens_per_s, load.correction.window_kv_tokens
    elif load.kv_usage_mean is not None and capacity.kv_tokens is not None:
        kv_tokens = load.kv_usage_mean * capacity.kv_tokens
    else:
        return None
    engines = max(1, capacity.engines)
    return StepWindow(
        batch=running / engines,
        kv_tokens=kv_tokens / engines,
        output_tokens_per_s=rate / engines,
        prompt_tokens_per_s=(load.prompt_tokens_per_s or 0.0) / engines,
        kv_usage=load.kv_usage_mean,
        preemptions=float(load.preemptions or 0),
        weight=(load.window_s or ROW_S) / ROW_S,
    )


def windows_of(loads: Iterable[Measurement], capacity: Capacity) -> list[StepWindow]:
    """Those loads that can be fitted."""
    found = (window_of(load, capacity) for load in loads)
    return [window for window in found if window is not None and not window.saturated]
