"""Real vLLM on the CPU for tests: engines over it, and an independent look at what is left."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autotune.engines.vllm import VllmEngine
from autotune.records.settings import Settings
from autotune.records.trial import EngineSpec
from tests.real_vllm.cpu_vllm import Paths, paths

# Starts in half a minute: nothing is compiled. The KV cache is 1 GiB, 46,592 tokens.
QUICK = Settings(enforce_eager=True, max_model_len=1024, max_num_seqs=16)
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


@pytest.fixture(scope="session")
def installed() -> Paths:
    """Where vLLM and the model are; skips where they are not installed."""
    found = paths()
    if found is None:
        pytest.skip("no CPU vLLM here: python tests/real_vllm/cpu_vllm.py")
    return found


@pytest.fixture(scope="session")
def make_vllm(installed: Paths) -> Callable[..., VllmEngine]:
    """``make(folder, **more)``: an engine over the real server."""

    def make(folder: Path, **more: Any) -> VllmEngine:
        spec = EngineSpec(
            kind="vllm",
            model=str(installed.model),
            vllm_command=f"{installed.vllm} serve",
            fixed=QUICK,
            silence_limit_s=300,
            start_limit_s=480,
            stop_grace_s=10,
        )
        environment = {**os.environ, **ENVIRONMENT, "AUTOTUNE_TEST": str(folder)}
        return VllmEngine(spec, folder=folder, environment=environment, **more)

    return make
