"""How long a run will take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Makespan of a planned run, first send to last finish, with its interval."""

    SCHEMA: ClassVar[str] = "autotune/forecast/1"

    requests: int
    makespan_s: float
    low_s: float
    high_s: float
    level: float
    """Probability that the interval claims, 0.95."""
    startup_s: float
    """Server start, not part of the makespan."""
    output_tokens_per_s: float
    """Steady rate that it rests on."""
    tail_share: float | None
    """Share of the makespan after the last refill, when fewer than the concurrency are in flight."""
    truncated_share: float | None
    length_source: str
    limits: tuple[str, ...] = ()
    """What it does not know, in words."""
