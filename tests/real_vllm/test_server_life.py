"""A real vLLM server from start to death: two servers, and two that cannot start; two minutes on 2 cores."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from autotune.engines.launch import Port
from autotune.engines.vllm import VllmEngine, VllmSession
from autotune.errors import LaunchFailed
from autotune.records.event import Event
from autotune.records.load import Message
from autotune.records.observation import Observation
from autotune.records.settings import Settings
from autotune.testing import mixed_load, never
from tests.contract.test_engines import processes_with
from tests.unit.engines.test_process import runs
from tests.unit.engines.test_vllm import TakenPort

pytestmark = [pytest.mark.real_vllm, pytest.mark.timeout(600)]

MakeVllm = Callable[..., VllmEngine]


class Life:
    """One server of this module, with what was said of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Event] = []
        self.session: VllmSession


@pytest.fixture(scope="module")
def life(make_vllm: MakeVllm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    """A server whose first port was taken by somebody else."""
    life = Life(tmp_path_factory.mktemp("life") / "attempts" / "0001")
    taken = TakenPort()
    ports = iter([taken, Port()])
    engine = make_vllm(life.folder, emit=life.events.append, new_port=lambda: next(ports))
    with engine.session(Settings()) as life.session:
        taken.close()
        yield life


def test_a_taken_port_is_seen_and_another_one_is_used(life: Life) -> None:
    notes = [str(event.data["text"]) for event in life.events if event.kind == "note"]
    assert len(notes) == 1
    assert "Address already in use" in notes[0]
    assert sorted(path.name for path in life.folder.glob("*.log")) == ["server.2.log", "server.log"]


def test_a_started_server_says_what_it_can_hold(life: Life) -> None:
    session = life.session
    assert 3 < session.startup_s < 480
    assert session.capacity.kv_tokens == 46592
    assert session.capacity.source == "log"
    assert session.capacity.engines == 1
    assert session.capacity.max_model_len == 1024
    assert session.capacity.max_num_seqs == 16
    assert session.versions["vllm"].startswith("0.32.0")
    assert session.resolved is not None
    assert not {"--port", "--host", "--served-model-name"} & set(session.argv)
    question = Message(role="user", content="What is the capital of France?")
    assert len(session.token_ids((question,)) or ()) in range(20, 60)


def test_one_load_and_the_counters_agree(life: Life) -> None:
    load = mixed_load(4, 12, tokens=20)
    seen = life.session.observe(load, stop=never)
    assert seen.end == "drained"
    asked = {request.id: request for request in (*load.start, *load.refill)}
    for outcome in seen.requests:
        assert outcome.error is None
        assert outcome.output_tokens == asked[outcome.id].max_tokens
        assert outcome.prompt_tokens == len(asked[outcome.id].prompt or ())
    first, last = seen.samples[0], seen.samples[-1]
    assert first.generation_tokens is not None
    assert last.generation_tokens is not None
    assert last.generation_tokens - first.generation_tokens == sum(r.output_tokens or 0 for r in seen.requests)
    assert seen.client.in_flight_max == 4


def test_an_engine_killed_under_load_is_a_death(life: Life) -> None:
    """The API server ends itself with exit code 0: no success."""
    engine = next(pid for pid, command in life.session.processes.items() if "EngineCore" in command)
    killed: list[int] = []

    def kill(so_far: Observation) -> None:
        if not killed and so_far.t_s > 1:
            os.kill(engine, signal.SIGKILL)
            killed.append(engine)

    seen = life.session.observe(mixed_load(4, 1000, tokens=100, salt="killed"), stop=kill)
    assert killed
    assert seen.end == "engine_died"
    assert seen.failure is not None
    assert seen.failure.kind == "engine_died"
    assert seen.failure.log_path == "attempts/0001/server.2.log"
    assert any(r.error is not None or r.ended_s is None for r in seen.requests)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        # 2 blocks of 128 tokens for a context of 1,024.
        (Settings(num_gpu_blocks_override=2), "kv_too_small"),
        (Settings(no_such_flag=3), "bad_flag"),
    ],
)
def test_a_server_that_cannot_start_says_why(
    make_vllm: MakeVllm, tmp_path: Path, settings: Settings, kind: str
) -> None:
    with pytest.raises(LaunchFailed) as caught, make_vllm(tmp_path).session(settings):
        pass
    assert caught.value.failure.kind == kind
    assert caught.value.failure.line
    assert processes_with("AUTOTUNE_TEST", str(tmp_path)) == []


def test_a_stop_under_load_leaves_nothing(make_vllm: MakeVllm, tmp_path: Path) -> None:
    """Also when the caller fails while the server is busy."""
    pids: list[int] = []

    def use(session: VllmSession) -> None:
        pids.extend(session.processes)
        session.observe(mixed_load(4, 1000, tokens=200), stop=lambda so_far: "enough" if so_far.t_s > 1 else None)
        raise KeyError

    with pytest.raises(KeyError), make_vllm(tmp_path).session(Settings()) as session:
        use(session)
    assert len(pids) >= 3
    assert processes_with("AUTOTUNE_TEST", str(tmp_path)) == []
    assert not any(runs(pid) for pid in pids)
