"""``winner.json``: what a search found, with everything needed to apply it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from autotune.records.forecast import Forecast
from autotune.records.measurement import Measurement
from autotune.records.settings import Settings

Verdict = Literal["winner", "no_clear_winner", "unconfirmed"]


@dataclass(frozen=True, kw_only=True)
class ClientSide:
    """How the run must be sent: the best server with the wrong number in flight is slow."""

    concurrency: int
    max_tokens: int
    sampling: Mapping[str, float] | None
    """``None``: the server's generation_config applies."""
    request_limit_s: float


@dataclass(frozen=True, kw_only=True)
class Gain:
    """The winner against one baseline."""

    baseline: str
    ratio: float | None
    """Winner's tokens/s over the baseline's; ``None``: the baseline could not be measured."""
    low: float | None
    high: float | None


@dataclass(frozen=True, kw_only=True)
class Winner:
    """Settings, client side, measurement and provenance of the best stable trial so far."""

    SCHEMA: ClassVar[str] = "autotune/winner/1"

    study: str
    verdict: Verdict
    why: str
    """One sentence."""
    trial: int
    model: str
    settings: Settings
    fixed: Settings
    """Flags that every candidate had."""
    client: ClientSide
    measurement: Measurement
    gains: tuple[Gain, ...]
    forecast: Forecast | None
    startup_s: float | None
    gpus: str | None
    vllm_command: str
    trials: int
    """Finished trials it was chosen from."""
    written_at: str
    versions: Mapping[str, str] = field(default_factory=dict)
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    resolved: Mapping[str, object] | None = None
    settles: str | None = None
    """What would settle it when there is no clear winner."""
    notes: tuple[str, ...] = ()
    """What the reader should know: random weights."""
