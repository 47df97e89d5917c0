"""Whole families of processes are ended, strangers never; checked by an independent look at /proc."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from autotune.engines.process import ServerProcess, end_orphans, family, orphans, record, server
from autotune.engines.process.family import MARKER, Family
from autotune.errors import AutotuneError, PrerequisiteError
from tests.fakes import vllm_faults

SLEEP = "import time; time.sleep(300)"


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-E", "-c", code]


def parent_of(code: str) -> str:
    """A program that starts ``code`` as its child and waits."""
    return (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-S', '-E', '-c', {code!r}]); time.sleep(300)"
    )


def size_of(code: str) -> int:
    """Processes that ``code`` comes to; of a daemon's two forks the first ends at once."""
    return 1 + code.count("Popen") + ("fork()" in code)


def wait_for(what: Callable[[], object], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not what():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)


def runs(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def recorded(folder: Path) -> dict[int, float]:
    data = json.loads((folder / "process.json").read_text())
    return {entry["pid"]: entry["started_s"] for entry in data["processes"]}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], ServerProcess]]:
    started: list[ServerProcess] = []

    def make(code: str, folder: Path = tmp_path) -> ServerProcess:
        started.append(ServerProcess.start(python(code), env=dict(os.environ), folder=folder))
        return started[-1]

    yield make
    for process in started:
        process.stop(grace_s=0)


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """Looks like ours in name and command, and runs beside."""
    with subprocess.Popen(python(SLEEP)) as process:
        yield process
        process.kill()


def test_output_and_errors_go_to_one_log(start: Callable[[str], ServerProcess], tmp_path: Path) -> None:
    process = start("import sys; print('out', flush=True); print('err', file=sys.stderr, flush=True)")
    wait_for(lambda: not process.alive)
    assert process.log_path == tmp_path / "server.log"
    assert process.log_path.read_text() == "out\nerr\n"


def test_a_second_server_of_an_attempt_gets_a_log_of_its_own(
    start: Callable[[str], ServerProcess], tmp_path: Path
) -> None:
    (tmp_path / "server.log").write_text("of an earlier life")
    assert start(SLEEP).log_path.name == "server.2.log"
    assert start(SLEEP).log_path.name == "server.3.log"
    assert (tmp_path / "server.log").read_text() == "of an earlier life"


@pytest.mark.parametrize(
    ("code", "exit_code"), [("raise SystemExit(3)", 3), ("", 0), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_exit_codes(start: Callable[[str], ServerProcess], code: str, exit_code: int) -> None:
    process = start(code)
    wait_for(lambda: not process.alive)
    assert process.exit_code == exit_code
    process.stop(grace_s=1)
    assert process.exit_code == exit_code
    assert not runs(process.pid)


def test_exit_code_where_children_are_reaped_by_the_kernel(start: Callable[[str], ServerProcess]) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        process = start("")
        wait_for(lambda: not process.alive)
        assert process.exit_code is not None
        process.stop(grace_s=1)
    finally:
        signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(SLEEP, id="alone"),
        pytest.param(parent_of(SLEEP), id="child"),
        pytest.param(parent_of(parent_of(SLEEP)), id="grandchild"),
        pytest.param(parent_of(vllm_faults.SETSID), id="child with a session of its own, deaf to TERM"),
        pytest.param(parent_of(vllm_faults.NESTED), id="grandchild with a session of its own"),
        pytest.param(parent_of(vllm_faults.RENAMED), id="renamed child"),
        pytest.param(parent_of(vllm_faults.DAEMON), id="daemon: reparented, a session of its own"),
        pytest.param(vllm_faults.DEAF, id="deaf to TERM"),
    ],
)
def test_stop_ends_the_whole_family(
    start: Callable[[str], ServerProcess], stranger: subprocess.Popen[bytes], tmp_path: Path, code: str
) -> None:
    depth = size_of(code)
    process = start(code)
    wait_for(lambda: len(process.living) >= depth)
    wait_for(lambda: set(process.living) <= set(recorded(tmp_path)))
    seen = list(process.living)
    process.stop(grace_s=0.3)
    assert not any(runs(pid) for pid in seen)
    assert process.living == {}
    assert stranger.poll() is None
    assert json.loads((tmp_path / "process.json").read_text())["ended"] is True


def test_children_of_a_killed_leader_are_ended(start: Callable[[str], ServerProcess]) -> None:
    process = start(parent_of(vllm_faults.SETSID))
    wait_for(lambda: len(process.living) == 2)
    os.kill(process.pid, signal.SIGKILL)
    wait_for(lambda: not process.alive)
    (child,) = process.living
    process.stop(grace_s=0.1)
    assert process.exit_code == -9
    assert not runs(child)


def test_term_is_given_time(start: Callable[[str], ServerProcess], tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "def bye(*_): time.sleep(0.2); print('tidy', flush=True); sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, bye); print('up', flush=True); time.sleep(300)"
    )
    process = start(code)
    wait_for(lambda: "up" in process.log_path.read_text())
    process.stop(grace_s=10)
    assert process.exit_code == 7
    assert "tidy" in process.log_path.read_text()
    process.stop(grace_s=10)


def test_what_survives_a_kill_is_named(start: Callable[[str], ServerProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    process = start(SLEEP)
    monkeypatch.setattr(family, "KILL_LIMIT_S", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(psutil.Process, "send_signal", lambda self, number: None)
        with pytest.raises(AutotuneError, match=rf"still there .*pid {process.pid}"):
            process.stop(grace_s=0)
    assert runs(process.pid)


def test_a_process_that_goes_while_it_is_looked_at_is_no_member() -> None:
    with subprocess.Popen(python(SLEEP)) as child:
        gone = psutil.Process(child.pid)
        child.kill()
    group = Family("marker", members=[gone])
    assert group.living() == []
    assert group.living_commands() == {}
    assert family.name(gone) == "?"
    assert not group._belongs(gone)
    assert family.processes([child.pid]) == []


def test_a_start_time_that_cannot_be_read_matches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: psutil.Process) -> float:
        raise psutil.NoSuchProcess(self.pid)

    monkeypatch.setattr(psutil.Process, "create_time", gone)
    assert family.started_s(psutil.Process()) is None
    assert record._matching([(os.getpid(), 1.0)]) == []


def test_commands_and_environments_that_may_not_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: psutil.Process) -> None:
        raise psutil.AccessDenied(self.pid)

    with subprocess.Popen(python(SLEEP)) as child:
        group = Family("marker", members=[psutil.Process(child.pid)])
        monkeypatch.setattr(psutil.Process, "cmdline", denied)
        monkeypatch.setattr(psutil.Process, "environ", denied)
        monkeypatch.setattr(psutil.Process, "send_signal", lambda self, number: denied(self))
        assert group.living_commands() == {}
        group._signal(signal.SIGTERM)
        group.look(closely=True)
        assert len(group.members()) == 1
        child.kill()


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PrerequisiteError, match="cannot start '/no/such'") as caught:
        ServerProcess.start(["/no/such"], env={}, folder=tmp_path)
    assert "--vllm-command" in str(caught.value)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PrerequisiteError, match="cannot write"):
        ServerProcess.start(python(SLEEP), env={}, folder=tmp_path / "file" / "attempt")


def test_a_disk_that_is_full_at_the_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    def full(folder: Path, group: Family, session: int, log: str, *, ended: bool) -> None:
        pids.append(session)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(server, "write_record", full)
    with pytest.raises(PrerequisiteError, match="No space left"):
        ServerProcess.start(python(SLEEP), env=dict(os.environ), folder=tmp_path)
    assert not runs(pids[0])


def test_a_record_is_whole_or_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "process.json").write_text("old")
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space"):
        record.write_record(tmp_path, Family("m"), 1, "server.log", ended=False)
    assert [p.name for p in tmp_path.iterdir()] == ["process.json"]
    assert (tmp_path / "process.json").read_text() == "old"


class TestOrphans:
    """A run that was killed, its server still there: another process is the owner."""

    @pytest.fixture
    def abandoned(self, tmp_path: Path) -> Iterator[Callable[[str], list[int]]]:
        left: list[int] = []

        def make(code: str) -> list[int]:
            owner = (
                "import os, sys, time\n"
                "from pathlib import Path\n"
                "from autotune.engines.process import ServerProcess\n"
                f"s = ServerProcess.start({python(code)!r}, env=dict(os.environ), folder=Path({str(tmp_path)!r}))\n"
                "limit = time.time() + 20\n"
                f"while len(s.living) < {size_of(code)} and time.time() < limit: time.sleep(0.01)\n"
                "time.sleep(0.6)\n"
                "print(*s.living, flush=True)\n"
                "time.sleep(300)\n"
            )
            with subprocess.Popen([sys.executable, "-c", owner], stdout=subprocess.PIPE, text=True) as process:
                try:
                    assert process.stdout is not None
                    left.extend(map(int, process.stdout.readline().split()))
                    self.while_alive = end_orphans(tmp_path)
                finally:
                    process.kill()
            return left

        yield make
        for pid in left:
            if runs(pid):
                os.kill(pid, signal.SIGKILL)

    @pytest.mark.parametrize("code", [SLEEP, parent_of(vllm_faults.SETSID), parent_of(vllm_faults.DAEMON)])
    def test_are_ended(
        self, abandoned: Callable[[str], list[int]], tmp_path: Path, stranger: subprocess.Popen[bytes], code: str
    ) -> None:
        left = abandoned(code)
        assert self.while_alive == []
        named = orphans(tmp_path)
        assert all(any(f"(pid {pid})" in line for line in named) for pid in left)
        assert all(runs(pid) for pid in left)
        lines = end_orphans(tmp_path, grace_s=0.2)
        assert len(lines) == len(left)
        assert all("left by a run that died" in line for line in lines)
        assert not any(runs(pid) for pid in left)
        assert stranger.poll() is None
        assert end_orphans(tmp_path) == orphans(tmp_path) == []

    def test_that_were_started_after_the_last_look_are_found_by_session(
        self, abandoned: Callable[[str], list[int]], tmp_path: Path
    ) -> None:
        left = abandoned(parent_of(parent_of(SLEEP)))
        path = tmp_path / "process.json"
        data = json.loads(path.read_text())
        data["processes"] = data["processes"][:1]
        data["marker"] = "lost"
        path.write_text(json.dumps(data))
        assert len(end_orphans(tmp_path, grace_s=0.2)) == len(left) == 3
        assert not any(runs(pid) for pid in left)

    def test_a_process_id_that_was_used_again_is_a_stranger(
        self, tmp_path: Path, stranger: subprocess.Popen[bytes]
    ) -> None:
        self.write(
            tmp_path, processes=[{"pid": stranger.pid, "started_s": 1.0}, {"pid": stranger.pid + 1, "started_s": None}]
        )
        assert end_orphans(tmp_path) == []
        assert stranger.poll() is None

    def test_of_another_place_are_not_looked_for(self, tmp_path: Path, stranger: subprocess.Popen[bytes]) -> None:
        started = family.started_s(psutil.Process(stranger.pid))
        self.write(tmp_path, place="another boot", processes=[{"pid": stranger.pid, "started_s": started}])
        assert "node7" in end_orphans(tmp_path)[0]
        assert stranger.poll() is None

    def test_without_a_record_there_is_nothing_to_do(self, tmp_path: Path) -> None:
        assert end_orphans(tmp_path) == []

    @pytest.mark.parametrize("text", ["", "[]", '{"processes": 3}', "{"])
    def test_a_damaged_record_ends_nothing(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "process.json").write_text(text)
        (line,) = end_orphans(tmp_path)
        assert "nothing was ended" in line
        assert orphans(tmp_path) == [line]

    def write(self, folder: Path, **changes: object) -> None:
        data = {
            "place": record._place(),
            "host": "node7",
            "owner": {"pid": os.getpid(), "started_s": 0.0},
            "marker": "none",
            "session": 0,
            "ended": False,
            "processes": [],
        }
        (folder / "process.json").write_text(json.dumps({**data, **changes}))


def test_a_place_without_proc_is_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: Path, **_: object) -> str:
        raise FileNotFoundError(2, "none")

    monkeypatch.setattr(Path, "read_text", missing)
    assert record._place() == os.uname().nodename


def test_every_child_carries_the_marker(start: Callable[[str], ServerProcess]) -> None:
    process = start(SLEEP)
    assert MARKER.encode() in Path(f"/proc/{process.pid}/environ").read_bytes()
    assert MARKER not in os.environ
