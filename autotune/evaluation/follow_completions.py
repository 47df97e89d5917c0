"""Forecast from the times at which answers ended and nothing else: a rate that wanders, so a wide interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CompletionsForecast:
    elapsed_s: float
    forecast_s: float
    low_s: float
    high_s: float
    done: bool
    limits: tuple[str, ...]


def forecast_completions(
    times_s: Sequence[float], counts: Sequence[float], *, requests: int, at_s: float | None = None
) -> CompletionsForecast:
    raise NotImplementedError
