"""A model, machines and a run for the tests of planning."""

from __future__ import annotations

from typing import Any

from autotune.hub import shipped
from autotune.physics.gpus import parse_gpus
from autotune.physics.laws import shipped_law
from autotune.physics.lengths import KnownLength
from autotune.physics.model_card import ModelCard
from autotune.planning.knowledge import Knowledge
from autotune.planning.ranking import PlannedRun
from autotune.records.settings import Settings

H200 = parse_gpus("8xH200")
LENGTH = Settings(max_model_len=16_384)


def card(name: str = "Qwen/Qwen3-32B") -> ModelCard:
    return ModelCard.from_config(shipped()[name], name)


def physics(name: str = "Qwen/Qwen3-32B", gpus: str = "8xH200") -> Knowledge:
    return Knowledge(card=card(name), hardware=parse_gpus(gpus))


def run(**changes: Any) -> PlannedRun:
    uncut, prompts = shipped_law("hle-reasoning", None)
    answers = KnownLength(uncut=uncut, max_tokens=changes.pop("max_tokens", 14_336), scale_sd=0.1)
    return PlannedRun(**{"requests": 2158, "prompts": prompts, "answers": answers, **changes})
