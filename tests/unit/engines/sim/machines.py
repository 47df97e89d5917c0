"""Engines and loads for the tests of the simulator."""

from __future__ import annotations

from typing import Any

from autotune.engines.sim import SimEngine, SimWorld
from autotune.hub import shipped
from autotune.physics.gpus import parse_gpus
from autotune.physics.model_card import ModelCard
from autotune.records.load import LoadPlan, Request
from autotune.records.observation import Observation
from autotune.records.trial import EngineSpec

MODEL = "Qwen/Qwen3-32B"
CARD = ModelCard.from_config(shipped()[MODEL], MODEL)
H200 = parse_gpus("8xH200")


def engine(world: SimWorld | None = None, *, gpus: str = "8xH200", model: str = MODEL, **changes: Any) -> SimEngine:
    kept = {name: changes.pop(name) for name in ("folder", "law", "emit") if name in changes}
    return SimEngine(EngineSpec(kind="sim", model=model, gpus=gpus, **changes), world=world, **kept)


def request(name: str, tokens: int, *, prompt: int = 100, **changes: Any) -> Request:
    return Request(id=name, prompt=(7,) * prompt, max_tokens=tokens, **{"forced": True, **changes})


def plan(concurrency: int, number: int, tokens: int = 200, **changes: Any) -> LoadPlan:
    made = tuple(request(f"r{i}", tokens + i % 50) for i in range(number))
    return LoadPlan(start=made[:concurrency], refill=made[concurrency:], **changes)


def never(so_far: Observation) -> str | None:
    return None


def after(seconds: float) -> Any:
    return lambda so_far: "long enough" if so_far.t_s >= seconds else None
