"""The contract of engines, over each of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from autotune.engines.base import Engine
from autotune.engines.process.family import MARKER
from autotune.engines.sim import SimEngine, SimWorld
from autotune.engines.vllm import VllmEngine
from autotune.records.trial import EngineSpec
from autotune.testing import EngineContract, MakeEngine

FAKE = Path(__file__).parents[1] / "fakes" / "fake_vllm.py"


class TestVllmOnTheFakeServer(EngineContract):
    """The real engine; only the server is not vLLM."""

    @pytest.fixture(autouse=True)
    def place(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "attempt"

    @pytest.fixture
    def make_engine(self) -> MakeEngine:
        def make(fault: str | None = None) -> Engine:
            faults = {None: "", "dies": "dies_on_request:12"}[fault]
            return VllmEngine(
                EngineSpec(
                    kind="vllm",
                    model="acme/fake",
                    vllm_command=f"{sys.executable} {FAKE} serve",
                    silence_limit_s=20,
                    start_limit_s=60,
                    stop_grace_s=3,
                ),
                folder=self.folder,
                environment={**os.environ, "FAKE_VLLM_FAULT": faults, "AUTOTUNE_TEST": str(self.folder)},
            )

        return make

    def left_over(self) -> list[str]:
        return processes_with("AUTOTUNE_TEST", str(self.folder))


def processes_with(variable: str, value: str) -> list[str]:
    """Processes that inherited a variable: an independent look, not by the engine's own records."""
    assert variable != MARKER
    wanted = f"{variable}={value}".encode()
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            environment = (place / "environ").read_bytes().split(b"\0")
            command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if wanted in environment and int(place.name) != os.getpid():
            found.append(f"{place.name}: {command}")
    return found


class TestSimulated(EngineContract):
    """The built-in engine: no process, no clock."""

    @pytest.fixture
    def make_engine(self, tmp_path: Path) -> MakeEngine:
        def make(fault: str | None = None) -> Engine:
            worlds = {None: SimWorld(7), "dies": SimWorld(7, oom_above=0.5)}
            spec = EngineSpec(kind="sim", model="Qwen/Qwen3-32B", gpus="8xH200")
            return SimEngine(spec, folder=tmp_path / "attempts" / "0000", world=worlds[fault])

        return make
