"""What is known of one model on one machine: physics, corrected by the launches and windows seen so far."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autotune.physics.gpus import Hardware
from autotune.physics.memory import Fit, MemoryModel, fits
from autotune.physics.model_card import ModelCard
from autotune.physics.stepfit import StepWindow, fit
from autotune.physics.stepstart import from_card, transferred
from autotune.physics.steptime import StepModel
from autotune.physics.stepwindows import windows_of
from autotune.records.settings import Settings
from autotune.records.trial import TrialResult

_COMPARED = ("t0_s", "sequence_s", "kv_token_s", "prefill_token_s")


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Constants of one set-up, measured."""

    start: StepModel
    """What physics said of it: the set-up's name, since equal start values are equal set-ups."""
    model: StepModel


@dataclass(frozen=True, kw_only=True)
class Knowledge:
    """Physics of a model on a machine, and what corrects it."""

    card: ModelCard
    hardware: Hardware
    memory: MemoryModel = field(default_factory=MemoryModel)
    fitted: tuple[Fitted, ...] = ()

    def fit(self, settings: Mapping[str, object]) -> Fit:
        """Whether a server with these flags (fixed ones included) starts, and what it holds."""
        return fits(self.card, self.hardware, settings, self.memory)

    def model(self, settings: Mapping[str, object]) -> StepModel:
        """Step constants of one engine: measured, else carried over from the nearest set-up measured, else physics."""
        start = from_card(self.card, self.hardware, settings, self.memory)
        if not self.fitted:
            return start
        nearest = min(self.fitted, key=lambda known: _distance(known.start, start))
        if _distance(nearest.start, start) < 1e-6:
            return dataclasses.replace(nearest.model, graph_limit=start.graph_limit)
        return transferred(nearest.model, nearest.start, start)


def learn(
    card: ModelCard, hardware: Hardware, results: Sequence[TrialResult], fixed: Mapping[str, object] | None = None
) -> Knowledge:
    """Knowledge from trials of this model on this machine.

    Every launch that told its KV capacity corrects the memory model; the steady windows of each set-up are fitted
    around its physics.

    Args:
        fixed: flags that every trial had beside its settings.
    """
    memory = MemoryModel()
    windows: dict[tuple[float, ...], list[StepWindow]] = defaultdict(list)
    starts: dict[tuple[float, ...], StepModel] = {}
    for result in results:
        flags = Settings({**(fixed or {}), **result.settings})
        if result.capacity is not None and result.capacity.kv_tokens is not None:
            memory = memory.observe(card, hardware, flags, result.capacity.kv_tokens)
        seen = [] if result.capacity is None else windows_of(result.loads, result.capacity)
        if seen:
            start = from_card(card, hardware, flags, memory)
            key = tuple(getattr(start, name) for name in _COMPARED)
            starts[key] = start
            windows[key] += seen
    fitted = tuple(Fitted(start=starts[key], model=fit(windows[key], starts[key])) for key in windows)
    return Knowledge(card=card, hardware=hardware, memory=memory, fitted=fitted)


def _distance(a: StepModel, b: StepModel) -> float:
    """How far set-ups are apart: the logarithms of their constants by physics."""
    pairs = [(getattr(a, name), getattr(b, name)) for name in _COMPARED]
    return sum(abs(math.log(x / y)) for x, y in pairs if x > 0 and y > 0)
