"""Which settings may be launched: a finite grid of levels per flag, and the rules that bind flags together."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from autotune.errors import InputError, NothingStableError
from autotune.physics.advice import advise_when_nothing_fits, usable_share
from autotune.physics.gpus import GIB, Hardware
from autotune.physics.layout import read_layout, whole
from autotune.physics.memory import MemoryModel, fits
from autotune.physics.model_card import ModelCard
from autotune.records.settings import FlagValue, Settings
from autotune.spec import Knob, StudySpec

MAX_LEVELS = 16
"""A range without a step is cut into at most so many levels: finer steps are below the noise."""

LEN_STEP = 1024
PROMPT_ROOM = 2048
"""Left for the prompt, tokens, unless prompts are longer."""
DOUBT_BYTES = 1.5 * GIB
"""Two standard deviations of what the memory model does not know of a GPU before its first launch."""

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


def card_fits(card: ModelCard, hardware: Hardware) -> Rule:
    """What cannot start by vLLM's own arithmetic is not launched; in doubt it is (``DOUBT_BYTES``)."""
    memory = MemoryModel(residuals=(-DOUBT_BYTES,))

    def rule(settings: Settings) -> str | None:
        return fits(card, hardware, settings, memory).reason

    return rule


def parallel_layouts(gpus: int) -> tuple[tuple[int, int], ...]:
    """Every (TP, DP) on so many GPUs: powers of two and divisors, all GPUs used first, then the largest TP first."""
    sizes = [n for n in range(1, gpus + 1) if n & (n - 1) == 0 or gpus % n == 0]
    pairs = [(tp, dp) for tp in sizes for dp in sizes if tp * dp <= gpus]
    return tuple(sorted(pairs, key=lambda pair: (-pair[0] * pair[1], -pair[0])))


def layouts(gpus: int, fixed: Mapping[str, FlagValue]) -> tuple[Settings, ...]:
    """One candidate for each TP x DP; those that ``fixed`` names are not varied."""
    kept = {name: fixed[name] for name in ("tensor_parallel_size", "data_parallel_size") if name in fixed}
    pairs = [{"tensor_parallel_size": tp, "data_parallel_size": dp, **kept} for tp, dp in parallel_layouts(gpus)]
    found = tuple(dict.fromkeys(Settings(pair) for pair in pairs))
    fitting = tuple(s for s in found if _ranks(s) <= gpus)
    # A layout that is asked for but needs more GPUs than there are is kept: its reason is told.
    return fitting or (min(found, key=_ranks),)


def _ranks(settings: Settings) -> int:
    return settings.integer("tensor_parallel_size", 1) * settings.integer("data_parallel_size", 1)


def needed_len(card: ModelCard, max_tokens: int, longest_prompt: int) -> int:
    """``max_model_len`` that the longest prompt and answer need, a multiple of 1,024, at most the model's own."""
    return min(card.max_model_len, LEN_STEP * math.ceil((longest_prompt + max_tokens) / LEN_STEP))


def kept_flags(
    card: ModelCard, hardware: Hardware, fixed: Settings, *, max_tokens: int, longest_prompt: int
) -> Settings:
    """``fixed``, and what every candidate needs beside it: ``max_model_len`` for the longest request, and no larger
    ``gpu_memory_utilization`` than others (a display) leave free.

    Raises:
        InputError: a flag that is no number where one is needed.
    """
    flags = fixed
    if "max_model_len" not in flags:
        room = max(longest_prompt, PROMPT_ROOM)
        flags = flags.with_(max_model_len=needed_len(card, max_tokens, room))
    if "gpu_memory_utilization" not in flags:
        wanted = read_layout(flags, card, hardware.gpu, MemoryModel().rules).gpu_memory_utilization
        share = usable_share(hardware, wanted)
        flags = flags.with_(gpu_memory_utilization=share) if 0 < share < wanted else flags
    return flags


def default_levels(
    gpus: int, card: ModelCard | None = None, max_model_len: int | None = None
) -> dict[str, tuple[FlagValue, ...]]:
    """Knobs worth trying for an offline run when the study names none.

    Layout, precision and number in flight are worth 1.5-10x, scheduler flags 0-30 %
    (published sweeps of 2025-26); so layout comes first and the scheduler's levels are coarse.

    Args:
        gpus: that a server may use; 0 on a CPU.
        card: of the model, where it is known: layouts that do not divide it are left out.
        max_model_len: what the longest request needs, where it is known.
    """
    levels: dict[str, tuple[FlagValue, ...]] = {}
    if gpus > 1:
        pairs = [(tp, dp) for tp, dp in parallel_layouts(gpus) if card is None or card.tp_problem(tp, dp) is None]
        levels["tensor_parallel_size"] = tuple(sorted({tp for tp, _ in pairs}, reverse=True))
        levels["data_parallel_size"] = tuple(sorted({dp for _, dp in pairs}))
    levels["max_num_seqs"] = (64, 128, 256, 512, 1024)
    levels["max_num_batched_tokens"] = (2048, 8192, 16384)
    if gpus > 0:
        levels["gpu_memory_utilization"] = (0.90, 0.92, 0.95)
    if max_model_len is not None:
        levels["max_model_len"] = (max_model_len,)
    return levels


def space_of(
    spec: StudySpec,
    gpus: int,
    *,
    card: ModelCard | None = None,
    hardware: Hardware | None = None,
    longest_prompt: int | None = None,
) -> Space:
    """The study's own space, or the default knobs; flags that are fixed are never varied.

    Args:
        spec: the study.
        gpus: GPUs that a server may use; 0 on a CPU.
        card: of the model, where its config is known.
        hardware: those GPUs, where they are known: with a card, what cannot fit is not launched.
        longest_prompt: of the run, tokens, where it is known.

    Raises:
        InputError: the rules leave nothing to launch.
        NothingStableError: nothing of it fits the memory; the hint says what would.
    """
    levels: dict[str, Any] = {name: knob_levels(name, knob) for name, knob in spec.space.items()}
    if not levels:
        length = None
        if card is not None and longest_prompt is not None:
            length = needed_len(card, spec.workload.max_tokens, longest_prompt)
        levels = default_levels(gpus, card, length)
        levels = {name: values for name, values in levels.items() if name not in spec.fixed}
    rules: tuple[Rule, ...] = (batch_covers_sequences,)
    if gpus > 0:
        rules = (*rules, parallel_fits(gpus))
    if card is not None and hardware is not None:
        rules = (*rules, card_fits(card, hardware))
    fixed = Settings(spec.fixed)

    def with_fixed(rule: Rule) -> Rule:
        return lambda settings: rule(Settings({**fixed, **settings}))

    space = Space(levels, tuple(with_fixed(rule) for rule in rules))
    if next(space.candidates(), None) is None:
        first = Settings({name: values[0] for name, values in levels.items()})
        others = Space(levels, space.rules[:-1])
        if card is not None and hardware is not None and next(others.candidates(), None) is not None:
            flags = {**fixed, **first}
            advice = advise_when_nothing_fits(card, hardware, whole(flags, "max_model_len", card.max_model_len), flags)
            raise NothingStableError(
                f"{spec.model} does not fit on {hardware.name}: {space.forbidden(first)}", hint="; ".join(advice.lines)
            )
        raise InputError(
            f"the space holds no setting that may be launched: {space.forbidden(first) or 'it is empty'}",
            hint="widen [space] in the study file, or free a flag under [fixed]",
        )
    return space
