"""Servers: start, load, read and stop them. ``engine_for`` picks the engine that a record names."""

from __future__ import annotations

from pathlib import Path

from autotune.engines.base import Engine
from autotune.errors import InputError
from autotune.records.event import Emit, nowhere
from autotune.records.trial import EngineSpec


def engine_for(spec: EngineSpec, *, folder: Path | None = None, emit: Emit = nowhere) -> Engine:
    """The engine of a record.

    Args:
        spec: which kind, model, command and limits.
        folder: of the attempt: log and process record.
        emit: where progress goes.

    Raises:
        InputError: the kind is not known.
    """
    if spec.kind == "vllm":
        from autotune.engines.vllm import VllmEngine

        return VllmEngine(spec, folder=folder, emit=emit)
    if spec.kind == "sim":
        from autotune.engines.sim import SimEngine

        return SimEngine(spec, folder=folder, emit=emit)
    raise InputError(f"engine {spec.kind!r} is not known", hint="known: vllm, sim")


def end_left_over(attempts: Path) -> list[str]:
    """End servers that an earlier, killed run of ours left under ``attempts``; says what was ended."""
    from autotune.engines.process import end_orphans

    return [line for folder in sorted(attempts.glob("*/")) for line in end_orphans(folder)]


def left_over(attempts: Path) -> list[str]:
    """What ``end_left_over`` would end, a line for each process."""
    from autotune.engines.process import orphans

    return [line for folder in sorted(attempts.glob("*/")) for line in orphans(folder)]
