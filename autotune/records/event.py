"""What is going on, as it happens: progress on stderr, the live screen and the exporter read these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

EventKind = Literal[
    "study_started",
    "trial_started",
    "server_starting",
    "server_ready",
    "load_started",
    "load_sampled",
    "load_ended",
    "server_stopped",
    "trial_ended",
    "winner_changed",
    "study_ended",
    "note",
]


@dataclass(frozen=True, kw_only=True)
class Event:
    """One thing that happened."""

    kind: EventKind
    trial: int | None = None
    data: Mapping[str, object] = field(default_factory=dict)
    """Plain values: seconds, tokens/s, shares, words."""


Emit = Callable[[Event], None]
"""Where events go; must not raise."""


def nowhere(event: Event) -> None:
    """An ``Emit`` that drops everything."""
