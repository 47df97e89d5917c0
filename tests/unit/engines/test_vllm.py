"""The engine of real servers over the fake one: starts, failures of starts, deaths under load, what is left."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from autotune.engines import startup, vllm
from autotune.engines.control import Control, ControlError, ServedModel
from autotune.engines.driver import drive
from autotune.engines.launch import HOST, Port
from autotune.engines.startup import cache_bytes
from autotune.engines.vllm import VllmEngine
from autotune.errors import InputError, LaunchFailed, PrerequisiteError
from autotune.records.event import Event
from autotune.records.load import Message
from autotune.records.observation import Failure
from autotune.records.settings import Settings
from autotune.records.trial import EngineSpec
from autotune.testing import mixed_load, never
from tests.contract.test_engines import FAKE, processes_with
from tests.unit.test_devices import GIB, H200, FakeNvml


class World:
    """Makes engines over the fake server, keeps their events, looks at what is left."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.events: list[Event] = []

    def engine(self, fault: str = "", *, env: dict[str, str] | None = None, **changes: Any) -> VllmEngine:
        own = {key: changes.pop(key) for key in ("nvml", "new_port", "memory_limit_s") if key in changes}
        folder = changes.pop("folder", self.folder)
        spec = {
            "kind": "vllm",
            "model": "acme/fake",
            "vllm_command": f"{sys.executable} {FAKE} serve",
            "silence_limit_s": 20.0,
            "start_limit_s": 30.0,
            "stop_grace_s": 0.5,
            **changes,
        }
        environment = {**os.environ, "FAKE_VLLM_FAULT": fault, "AUTOTUNE_TEST": str(self.folder), **(env or {})}
        return VllmEngine(EngineSpec(**spec), folder=folder, emit=self.events.append, environment=environment, **own)

    def start_fails(self, fault: str, **changes: Any) -> LaunchFailed:
        with pytest.raises(LaunchFailed) as caught, self.engine(fault, **changes).session(Settings()):
            pass
        assert self.left() == []
        return caught.value

    def left(self) -> list[str]:
        return processes_with("AUTOTUNE_TEST", str(self.folder))

    def notes(self) -> list[str]:
        return [str(event.data["text"]) for event in self.events if event.kind == "note"]

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "attempts" / "0007")


def test_a_session_knows_its_server(world: World) -> None:
    settings = Settings(max_num_seqs=32, max_model_len=2048, data_parallel_size=2)
    with world.engine(fixed=Settings(dtype="bfloat16", max_num_seqs=8)).session(settings) as session:
        assert session.capacity.kv_tokens == 2 * 65536
        assert session.capacity.engines == 2
        assert session.capacity.max_model_len == 2048
        assert session.capacity.max_num_seqs == 32
        assert session.capacity.source == "log"
        assert session.versions == {"vllm": "0.33.0"}
        assert session.resolved is not None
        assert session.resolved["model_config"] == {"model": "acme/fake", "max_model_len": 2048}
        words = ("--data-parallel-size", "2", "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "32")
        assert session.argv[-8:] == words
        assert len(session.processes) == 2
    assert world.kinds() == ["server_starting", "server_ready", "server_stopped"]
    assert world.left() == []


def test_the_recorded_line_is_the_same_for_each_start(world: World) -> None:
    lines = []
    for _ in range(2):
        with world.engine().session(Settings(max_num_seqs=32)) as session:
            lines.append(session.argv)
    assert lines[0] == lines[1] == (sys.executable, str(FAKE), "serve", "acme/fake", "--max-num-seqs", "32")


def test_capacity_from_the_counters_where_the_log_is_silent(world: World) -> None:
    with world.engine("no_kv_line").session(Settings(data_parallel_size=2)) as session:
        assert session.capacity.kv_tokens == 2 * 65536
        assert session.capacity.source == "metrics"


def test_tokens_by_the_server(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ControlError("no such route", 404)

    question = (Message(role="user", content="one two"),)
    with world.engine().session(Settings()) as session:
        assert len(session.token_ids(question) or ()) == 5
        assert len(session.token_ids(question, {"enable_thinking": False}) or ()) == 5
        monkeypatch.setattr(Control, "tokenize", refuse)
        assert session.token_ids(question) is None


def test_secrets_stay_in_the_environment(world: World) -> None:
    env = {"VLLM_API_KEY": "sk-hush-hush", "HF_TOKEN": "hf_hushhush"}
    with world.engine(env=env).session(Settings()) as session:
        seen = session.observe(mixed_load(2, 4), stop=never)
        shown = [*session.argv, *session.processes.values()]
    assert seen.end == "drained"
    written = [path.read_text() for path in world.folder.iterdir()]
    assert not any("hush" in text for text in (*shown, *written, repr(seen), repr(world.events)))


def test_a_flag_that_is_ours_and_a_program_that_is_not_there(world: World) -> None:
    with pytest.raises(InputError, match="port is not a setting"), world.engine().session(Settings(port=3)):
        pass
    with (
        pytest.raises(PrerequisiteError, match="'no-such-vllm' is not installed"),
        world.engine(vllm_command="no-such-vllm serve").session(Settings()),
    ):
        pass
    with (
        pytest.raises(PrerequisiteError, match="'vllm' is not installed"),
        world.engine("dies_at_start:no_vllm").session(Settings()),
    ):
        pass
    assert world.left() == []


KINDS = ["kv_too_small", "no_kv_memory", "oom", "gpu_busy", "tp_not_divisible", "gated_model", "nccl", "bad_flag"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_start_that_fails_says_why(world: World, kind: str) -> None:
    error = world.start_fails(f"dies_at_start:{kind}")
    assert error.failure.kind == kind
    assert error.failure.line
    assert error.failure.hint
    assert error.failure.log_path == "attempts/0007/server.log"
    assert 0 < error.seconds < 20


@pytest.mark.parametrize("fault", ["dies_at_start:code_0", "dies_at_start:quietly", "dies_after:0.2:quietly"])
def test_an_exit_without_a_word_is_a_failure_whatever_its_code(world: World, fault: str) -> None:
    error = world.start_fails(fault)
    assert error.failure.kind == "unknown"
    assert "exit code" in (error.failure.hint or "")


@pytest.mark.parametrize(
    "settings",
    [
        (Settings(tensor_parallel_size=3), "tp_not_divisible"),
        (Settings(max_model_len=50000), "max_model_len_too_long"),
        (Settings(num_gpu_blocks_override=10), "kv_too_small"),
        (Settings(tensor_parallel_size=16), "not_enough_gpus"),
        (Settings(no_such_flag=1), "bad_flag"),
    ],
)
def test_settings_that_cannot_start(world: World, settings: tuple[Settings, str]) -> None:
    with pytest.raises(LaunchFailed) as caught, world.engine().session(settings[0]):
        pass
    assert caught.value.failure.kind == settings[1]


def test_silence_ends_a_start(world: World) -> None:
    error = world.start_fails("silent", silence_limit_s=0.6)
    assert error.failure.kind == "start_timeout"
    assert "no new line of log" in error.failure.line
    assert "non-default args" in error.failure.line


@pytest.mark.parametrize("fault", ["never_ready", "wrong_name"])
def test_a_server_that_talks_but_never_gets_ready(world: World, fault: str) -> None:
    error = world.start_fails(fault, start_limit_s=1.5)
    assert error.failure.kind == "start_timeout"
    assert "not ready after" in error.failure.line


def test_a_download_is_given_its_time(world: World) -> None:
    with world.engine("downloads:1.5", start_limit_s=1.4).session(Settings()) as session:
        assert session.startup_s > 1.5


def test_a_cache_that_grows_is_no_silence(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "CACHE_EVERY_S", 0.1)
    sizes = iter(range(10_000))
    monkeypatch.setattr(vllm, "cache_bytes", lambda model, env: next(sizes))
    with world.engine("loads_silently:1.2", silence_limit_s=0.5).session(Settings()) as session:
        assert session.startup_s > 1.2


def test_a_log_that_names_the_end_while_the_process_stays(world: World) -> None:
    error = world.start_fails("lingers:oom", silence_limit_s=0.4)
    assert error.failure.kind == "oom"


def test_slow_health_is_waited_for(world: World) -> None:
    with world.engine("slow_health:0.8").session(Settings()) as session:
        assert session.startup_s > 0.8


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("dies_on_request:1", "engine_died"), ("dies_on_request:1:oom", "oom"), ("exits_on_request:1:3", "engine_died")],
)
def test_a_server_that_dies_on_its_first_token_is_not_ready(world: World, fault: str, kind: str) -> None:
    assert world.start_fails(fault).failure.kind == kind


def test_a_server_that_does_not_generate_is_not_ready(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "DEATH_S", 0.1)
    error = world.start_fails("errors:1")
    assert "did not answer a first request" in error.failure.line
    assert world.start_fails("hangs_on_request:1", silence_limit_s=0.8).failure.kind == "start_timeout"


class TakenPort:
    """Somebody else listens on it."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.bind((HOST, 0))
        self._socket.listen()
        self.number: int = self._socket.getsockname()[1]

    def release(self) -> None:
        """Not ours to give."""

    def close(self) -> None:
        self._socket.close()


def test_a_taken_port_is_not_the_settings_fault(world: World) -> None:
    with closing(TakenPort()) as taken:
        ports = iter([taken, Port()])
        with world.engine(new_port=lambda: next(ports)).session(Settings()) as session:
            assert session.capacity.engines == 1
        assert "port taken" in world.notes()[0]
        assert sorted(path.name for path in world.folder.glob("*.log")) == ["server.2.log", "server.log"]
        assert world.start_fails("", new_port=lambda: taken).failure.kind == "port_in_use"


@pytest.mark.parametrize(
    ("fault", "kind", "says"),
    [
        ("dies_on_request:9", "engine_died", ""),
        ("dies_on_request:9:oom", "oom", "out of memory"),
        ("exits_on_request:9:0", "engine_died", "exit code 0"),
        ("exits_on_request:9:-9", "engine_died", "SIGKILL"),
    ],
)
def test_an_exit_that_nobody_asked_for_is_a_death(world: World, fault: str, kind: str, says: str) -> None:
    with world.engine(fault).session(Settings()) as session:
        seen = session.observe(mixed_load(4, 1000), stop=never)
    assert seen.end == "engine_died"
    assert seen.failure is not None
    assert seen.failure.kind == kind
    assert says in f"{seen.failure.line} {seen.failure.hint}"
    assert seen.failure.log_path == "attempts/0007/server.log"
    assert world.left() == []


def test_a_death_that_shows_after_the_last_request(world: World) -> None:
    """The only request fails, so the load is over before the server is."""
    with world.engine("dies_on_request:2:oom").session(Settings()) as session:
        seen = session.observe(mixed_load(1, 1), stop=never)
    assert (seen.end, seen.failure and seen.failure.kind) == ("engine_died", "oom")


@pytest.mark.parametrize("requests", [1, 200])
def test_a_dead_engine_behind_a_server_that_stays(world: World, monkeypatch: pytest.MonkeyPatch, requests: int) -> None:
    monkeypatch.setattr(vllm, "DEATH_S", 0.1)
    with world.engine("dies_on_request:2,stays_up").session(Settings()) as session:
        seen = session.observe(mixed_load(1, requests), stop=never)
    assert seen.end == "engine_died"
    assert seen.failure is not None
    assert "503" in seen.failure.line


def test_a_server_that_is_only_slow_to_say_that_it_is_well_is_not_dead(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "DEATH_S", 0.1)
    with world.engine("errors:3").session(Settings()) as session:
        monkeypatch.setattr(Control, "health", lambda self: None)
        seen = session.observe(mixed_load(1, 4), stop=never)
    assert (seen.end, seen.failure) == ("drained", None)


def test_a_page_of_counters_or_models_that_fails_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Control.models
    asked: list[int] = []

    def fail(self: Control) -> str:
        raise ControlError("GET /metrics: late")

    def fail_once(self: Control) -> tuple[ServedModel, ...]:
        asked.append(1)
        if len(asked) == 1:
            raise ControlError("GET /v1/models: not yet", 500)
        return real(self)

    monkeypatch.setattr(Control, "metrics", fail)
    monkeypatch.setattr(Control, "models", fail_once)
    with world.engine().session(Settings(data_parallel_size=2)) as session:
        assert session.capacity.engines == 2
        assert session.capacity.kv_tokens == 2 * 65536
    assert len(asked) == 2


def test_an_engine_that_is_killed_from_outside(world: World) -> None:
    with world.engine().session(Settings()) as session:
        (engine,) = (pid for pid, command in session.processes.items() if "time.sleep" in command)

        def kill(so_far: object) -> None:
            subprocess.run(["kill", "-9", str(engine)], check=False)

        seen = session.observe(mixed_load(4, 5000), stop=kill)
    assert seen.end == "engine_died"
    assert seen.failure is not None
    assert seen.failure.kind == "engine_died"


def test_failed_requests_are_no_death(world: World) -> None:
    with world.engine("errors:3,drops:4").session(Settings()) as session:
        seen = session.observe(mixed_load(2, 12), stop=never)
    assert seen.end == "drained"
    assert {r.error.kind for r in seen.requests if r.error is not None} == {"server", "connect"}


@pytest.mark.parametrize(("said", "kind"), [(None, "stalled"), (Failure(kind="nccl", line="NCCL error"), "nccl")])
def test_a_stall_is_explained_by_the_log_where_it_says_why(
    world: World, monkeypatch: pytest.MonkeyPatch, said: Failure | None, kind: str
) -> None:
    monkeypatch.setattr(vllm, "drive", functools.partial(drive, stall_s=0.5, sample_s=0.2))
    with world.engine("hangs_on_request:6").session(Settings()) as session:
        monkeypatch.setattr(startup.ServerLog, "failure", lambda *_, **__: said)
        seen = session.observe(mixed_load(2, 50), stop=never)
    assert seen.end == "stalled"
    assert seen.failure is not None
    assert seen.failure.kind == kind
    assert seen.failure.log_path == "attempts/0007/server.log"


@pytest.mark.parametrize(
    "fault", ["child_setsid", "child_renamed", "child_deaf", "child_daemon", "child_nested", "ignores_term", "renamed"]
)
def test_nothing_is_left_of_odd_families(world: World, fault: str) -> None:
    with world.engine(fault).session(Settings()) as session:
        assert len(session.processes) >= 2
    assert world.left() == []


def test_a_start_that_is_given_up_is_cleaned_like_any_other(world: World) -> None:
    world.start_fails("wrong_name,child_setsid,ignores_term", start_limit_s=1.5)


def test_orphans_of_a_killed_run_are_ended_first(world: World) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom autotune.engines.process import ServerProcess\n"
        "argv = [sys.executable, '-c', 'import time; time.sleep(300)']\n"
        f"s = ServerProcess.start(argv, env=dict(os.environ), folder=Path({str(world.folder)!r}))\n"
        "os.kill(os.getpid(), 9)\n"
    )
    env = {**os.environ, "AUTOTUNE_TEST": str(world.folder)}
    subprocess.run([sys.executable, "-c", code], check=False, env=env)
    assert len(world.left()) == 1
    with world.engine().session(Settings()):
        assert len(world.left()) == 2
    assert "left by a run that died" in world.notes()[0]


def test_without_a_folder_the_log_goes_to_a_new_one(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with world.engine(folder=None).session(Settings()):
        pass
    (log,) = tmp_path.glob("autotune-*/server.log")
    assert "startup complete" in log.read_text()


def test_devices_are_what_the_server_sees(world: World) -> None:
    nvml = FakeNvml([H200, H200])
    with world.engine(nvml=nvml, devices=(1,)).session(Settings()) as session:
        environment = Path(f"/proc/{min(session.processes)}/environ").read_bytes()
    assert b"\0CUDA_VISIBLE_DEVICES=1\0" in environment
    with pytest.raises(InputError, match="GPU 2"), world.engine(nvml=nvml, devices=(2,)).session(Settings()):
        pass


def test_memory_that_does_not_come_back_is_told(world: World) -> None:
    nvml = FakeNvml([H200], readings=[GIB, 80 * GIB], owners=[77])
    with world.engine(nvml=nvml, memory_limit_s=0.01).session(Settings()):
        pass
    assert "GPU 0: 79.0 GiB more than before the start, held by pid 77" in world.notes()[0]
    assert world.kinds()[-1] == "server_stopped"


def test_bytes_of_the_hub_cache(tmp_path: Path) -> None:
    blobs = tmp_path / "hub" / "models--acme--m" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "one").write_bytes(b"abc")
    (blobs / "two.incomplete").write_bytes(b"de")
    assert cache_bytes("acme/m", {"HF_HOME": str(tmp_path)}) == 5
    assert cache_bytes("acme/m", {"HF_HUB_CACHE": str(tmp_path / "hub")}) == 5
    assert cache_bytes("acme/other", {"HF_HOME": str(tmp_path)}) == 0
    assert cache_bytes(str(tmp_path), {}) is None
    assert cache_bytes("gpt2", {}) is None


def test_now_is_a_clock(world: World) -> None:
    clock: Callable[[], float] = world.engine().now
    assert clock() <= clock()
