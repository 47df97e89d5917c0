"""Which settings may be launched: a finite grid of levels per flag, and the rules that bind flags together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.errors import InputError
from autotune.records.settings import FlagValue, Settings
from autotune.spec import Knob, StudySpec

MAX_LEVELS = 16
"""A range without a step is cut into at most so many levels: finer steps are below the noise."""

Rule = Callable[[Settings], str | None]
"""Says why a combination must not be launched, or ``None``."""


@dataclass(frozen=True)
class Space:
    """Levels of each searched flag and the rules between them."""

    levels: Mapping[str, tuple[FlagValue, ...]]
    rules: tuple[Rule, ...] = field(default=())

    @property
    def size(self) -> int:
        """Combinations, forbidden ones included."""
        return math.prod(len(values) for values in self.levels.values()) if self.levels else 0

    def forbidden(self, settings: Settings) -> str | None:
        """Why ``settings`` must not be launched, or ``None``."""
        return next((reason for rule in self.rules if (reason := rule(settings)) is not None), None)

    def candidates(self) -> Iterator[Settings]:
        """Every allowed combination, in the order in which the levels are written."""
        if not self.levels:
            return
        for values in itertools.product(*self.levels.values()):
            settings = Settings(dict(zip(self.levels, values, strict=True)))
            if self.forbidden(settings) is None:
                yield settings


def knob_levels(name: str, knob: Knob) -> tuple[FlagValue, ...]:
    """The values that a knob of a study file takes.

    Ranges of whole numbers give whole numbers; without a step they give at most ``MAX_LEVELS`` values, evenly
    spaced, or geometrically where ``log`` is set.
    """
    if knob.choices is not None:
        return knob.choices
    low, high = knob.low, knob.high
    if low is None or high is None:
        raise InputError(f"space: {name}: a range needs low and high", hint=f"{name} = {{low = 64, high = 256}}")
    whole = isinstance(low, int) and isinstance(high, int) and (knob.step is None or isinstance(knob.step, int))
    if knob.step is not None:
        count = int((high - low) / knob.step + 1e-9) + 1
        values: list[float] = [low + i * knob.step for i in range(count)]
    else:
        count = min(MAX_LEVELS, int(high - low) + 1) if whole else MAX_LEVELS
        share = [i / (count - 1) for i in range(count)]
        values = [low * (high / low) ** s if knob.log else low + s * (high - low) for s in share]
    if whole:
        return tuple(dict.fromkeys(round(value) for value in values))
    return tuple(dict.fromkeys(float(f"{value:.6g}") for value in values))


def batch_covers_sequences(settings: Settings) -> str | None:
    """vLLM's own rule: a step must be able to hold one token of each sequence (config/scheduler.py)."""
    batched, seqs = settings.get("max_num_batched_tokens"), settings.get("max_num_seqs")
    if isinstance(batched, int) and isinstance(seqs, int) and batched < seqs:
        return f"max_num_batched_tokens ({batched}) must be at least max_num_seqs ({seqs})"
    return None


def parallel_fits(gpus: int) -> Rule:
    """All ranks together need no more GPUs than there are."""

    def rule(settings: Settings) -> str | None:
        ranks = math.prod(settings.integer(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline", "data"))
        return f"{ranks} ranks need {ranks} GPUs, there are {gpus}" if ranks > gpus else None

    return rule


def default_levels(gpus: int) -> dict[str, tuple[FlagValue, ...]]:
    """Knobs worth trying for an offline run when the study names none.

    Layout, precision and number in flight are worth 1.5-10x, scheduler flags 0-30 %
    (published sweeps of 2025-26); so layout comes first and the scheduler's levels are coarse.
    """
    levels: dict[str, tuple[FlagValue, ...]] = {}
    if gpus > 1:
        powers = tuple(2**i for i in range(gpus.bit_length()) if 2**i <= gpus)
        levels["tensor_parallel_size"] = powers[::-1]
        levels["data_parallel_size"] = powers
    levels["max_num_seqs"] = (64, 128, 256, 512, 1024)
    levels["max_num_batched_tokens"] = (2048, 8192, 16384)
    if gpus > 0:
        levels["gpu_memory_utilization"] = (0.90, 0.92, 0.95)
    return levels


def space_of(spec: StudySpec, gpus: int) -> Space:
    """The study's own space, or the default knobs; flags that are fixed are never varied.

    Args:
        spec: the study.
        gpus: GPUs that a server may use; 0 on a CPU.

    Raises:
        InputError: the rules leave nothing to launch.
    """
    levels: dict[str, Any] = {name: knob_levels(name, knob) for name, knob in spec.space.items()}
    if not levels:
        levels = {name: values for name, values in default_levels(gpus).items() if name not in spec.fixed}
    rules: tuple[Rule, ...] = (batch_covers_sequences,)
    if gpus > 0:
        rules = (*rules, parallel_fits(gpus))
    fixed = Settings(spec.fixed)

    def with_fixed(rule: Rule) -> Rule:
        return lambda settings: rule(Settings({**fixed, **settings}))

    space = Space(levels, tuple(with_fixed(rule) for rule in rules))
    if next(space.candidates(), None) is None:
        first = Settings({name: values[0] for name, values in levels.items()})
        raise InputError(
            f"the space holds no setting that may be launched: {space.forbidden(first) or 'it is empty'}",
            hint="widen [space] in the study file, or free a flag under [fixed]",
        )
    return space
