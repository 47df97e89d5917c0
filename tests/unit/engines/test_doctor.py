from __future__ import annotations

import fcntl
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from autotune import devices
from autotune.devices import Gpu
from autotune.engines import doctor
from autotune.engines.ceiling import Ceiling
from autotune.engines.doctor import GIB, Check, examine
from autotune.errors import AutotuneError
from autotune.records.codec import encode
from tests.unit.test_devices import H200, FakeNvml

CEILING = Ceiling(
    streams=512,
    tokens_per_s=30000.4,
    cpu_s_per_million_tokens=21.0,
    loop_lag_s=0.012,
    whole_answers_per_s=2500.0,
)


def a_gpu(index: int = 0, used: int = 0, owners: tuple[int, ...] = ()) -> Gpu:
    return Gpu(index=index, uuid=f"GPU-{index}", name=H200, total_bytes=140 * GIB, used_bytes=used, owners=owners)


def script(folder: Path, first: str, name: str = "vllm") -> Path:
    path = folder / name
    path.write_text(f"{first}\n")
    path.chmod(0o755)
    return path


def a_python(folder: Path, code: str) -> Path:
    """An interpreter that answers our question about the version with ``code`` of a shell."""
    return script(folder, f"#!/bin/sh\n{code}", "python3.11")


class TestVllm:
    def look(self, command: str) -> Check:
        return doctor.vllm(command, {"PATH": os.defpath})

    def test_is_found_with_its_version(self, tmp_path: Path) -> None:
        program = script(tmp_path, f"#!{a_python(tmp_path, 'echo 0.32.0+cpu')}")
        check = self.look(f"{program} serve")
        assert (check.status, check.text) == ("ok", f"vLLM 0.32.0+cpu by {program}")

    def test_is_found_through_its_python(self, tmp_path: Path) -> None:
        python = a_python(tmp_path, "echo 0.11.0")
        assert self.look(f"{python} -m vllm.entrypoints.openai.api_server").text == f"vLLM 0.11.0 by {python}"

    def test_is_not_installed_in_the_python_that_is_named(self) -> None:
        check = self.look(f"{sys.executable} -m vllm.entrypoints.openai.api_server")
        assert check.status == "missing"
        assert "not installed" in check.text
        assert check.hint is not None
        assert "pip install" in check.hint

    @pytest.mark.parametrize("command", ["no-such-program serve", "", "vllm 'serve"])
    def test_a_command_that_cannot_start(self, command: str) -> None:
        check = self.look(command)
        assert check.status == "missing"
        assert check.hint

    @pytest.mark.parametrize("first", ["#!/bin/sh", "#!/usr/bin/env python3", "no script"])
    def test_a_wrapper_is_believed(self, tmp_path: Path, first: str) -> None:
        assert self.look(f"{script(tmp_path, first, 'start')} {{args}}").status == "note"

    def test_a_program_that_cannot_be_read_is_a_wrapper(self, tmp_path: Path) -> None:
        assert doctor._python_of(tmp_path / "not-there") is None

    def test_a_script_whose_python_is_gone(self, tmp_path: Path) -> None:
        check = self.look(str(script(tmp_path, f"#!{tmp_path}/bin/python3")))
        assert check.status == "missing"
        assert "does not run" in check.text


def test_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "driver_version", lambda: "570.1")
    assert doctor.driver() == Check(name="driver", status="ok", text="NVIDIA 570.1")
    monkeypatch.setattr(devices, "driver_version", lambda: None)
    assert doctor.driver().status == "note"


def test_a_gpu_in_use_names_who_uses_it() -> None:
    free = doctor.gpu(a_gpu(used=GIB // 2))
    assert (free.status, free.text) == ("ok", "NVIDIA H200: 0.5 of 140.0 GiB in use")
    busy = doctor.gpu(a_gpu(3, used=70 * GIB, owners=(os.getpid(), 1 << 22)))
    assert (busy.name, busy.status) == ("GPU 3", "note")
    assert f"(pid {os.getpid()}), pid {1 << 22}, not visible here" in busy.text
    hidden = doctor.gpu(a_gpu(used=70 * GIB))
    assert "processes that NVML does not show" in hidden.text


class TestLocks:
    def test_free(self, tmp_path: Path) -> None:
        env = {"AUTOTUNE_LOCKS": str(tmp_path / "locks")}
        assert doctor.locks([a_gpu()], tmp_path, env).status == "ok"

    def test_held(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        env = {"AUTOTUNE_LOCKS": str(tmp_path / "locks")}
        monkeypatch.setenv("AUTOTUNE_LOCKS", env["AUTOTUNE_LOCKS"])
        with devices.lock_gpu(a_gpu(), "autotune search of study night"):
            one = doctor.locks([a_gpu(), a_gpu(1)], tmp_path, env)
            every = doctor.locks([a_gpu()], tmp_path, env)
        assert (one.status, every.status) == ("note", "missing")
        assert f"GPU 0 is held by autotune search of study night (pid {os.getpid()}" in one.text
        assert doctor.locks([a_gpu()], tmp_path, env).status == "ok"

    def test_of_a_study(self, tmp_path: Path) -> None:
        (tmp_path / "night").mkdir()
        with devices.lock(tmp_path / "night" / "lock", "me"):
            check = doctor.locks([], tmp_path, {"AUTOTUNE_LOCKS": str(tmp_path / "locks")})
        assert check.status == "note"
        assert "study night is held by me" in check.text

    def test_a_folder_that_cannot_be_used(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        check = doctor.locks([], tmp_path, {"AUTOTUNE_LOCKS": str(tmp_path / "file")})
        assert check.status == "missing"


class TestDisk:
    def test_a_folder_that_is_not_there_yet(self, tmp_path: Path) -> None:
        check = doctor.disk("studies", tmp_path / "a" / "b")
        assert (check.status, check.name) == ("ok", "studies")
        assert "GiB free" in check.text
        assert not (tmp_path / "a").exists()

    def test_full(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(doctor, "LEAST_BYTES", 1 << 60)
        assert doctor.disk("studies", tmp_path).status == "missing"
        assert [check.status for check in doctor.caches({"HOME": str(tmp_path)})] == ["note", "note"]

    def test_not_to_be_written_to(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        check = doctor.disk("studies", tmp_path / "file")
        assert (check.status, check.hint) == ("missing", "change its permissions, or name another folder")

    def test_the_places_of_the_caches(self, tmp_path: Path) -> None:
        def places(**env: str) -> list[str]:
            return [check.text.split(":")[0] for check in doctor.caches(env)]

        root = str(tmp_path)
        assert places(HOME=root) == [f"{root}/.cache/huggingface/hub", f"{root}/.cache/vllm"]
        assert places(HF_HOME=f"{root}/h", VLLM_CACHE_ROOT=f"{root}/v") == [f"{root}/h/hub", f"{root}/v"]
        assert places(HF_HUB_CACHE=f"{root}/c", XDG_CACHE_HOME=root) == [f"{root}/c", f"{root}/vllm"]


class TestHub:
    def test_offline(self, tmp_path: Path) -> None:
        check = doctor.hub({"HF_HUB_OFFLINE": "1", "HF_TOKEN": "hf_secretsecret", "HOME": str(tmp_path)})
        assert (check.status, check.text) == ("note", "not asked: HF_HUB_OFFLINE is set (a token is set)")

    def test_not_reachable(self, tmp_path: Path) -> None:
        check = doctor.hub({"HF_ENDPOINT": "http://user:password@127.0.0.1:1", "HOME": str(tmp_path)})
        assert check.status == "note"
        assert "cannot be reached" in check.text
        assert "password" not in check.text
        assert doctor.hub({"HF_ENDPOINT": "http://[", "HOME": str(tmp_path)}).status == "note"

    def test_reachable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[Any] = []
        monkeypatch.setattr(httpx, "head", lambda url, timeout: asked.append(url))
        (tmp_path / "token").write_text("hf_secretsecret")
        with_token = doctor.hub({"HF_HOME": str(tmp_path)})
        assert (with_token.status, with_token.text) == ("ok", "huggingface.co answers (a token is set)")
        without = doctor.hub({"HOME": str(tmp_path), "HF_ENDPOINT": "https://hub.example"})
        assert without.hint is not None
        assert "HF_TOKEN" in without.hint
        assert asked == ["https://huggingface.co", "https://hub.example"]


@pytest.mark.parametrize(("hard", "status"), [(resource.RLIM_INFINITY, "ok"), (65536, "ok"), (1024, "note")])
def test_open_files(monkeypatch: pytest.MonkeyPatch, hard: int, status: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, hard))
    assert doctor.open_files().status == status


class TestLeftServers:
    def test_none(self, tmp_path: Path) -> None:
        assert doctor.left_servers(tmp_path, clean=False).status == "ok"

    def test_are_named_and_only_ended_on_demand(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "night" / "attempts").mkdir(parents=True)
        monkeypatch.setattr(doctor, "left_over", lambda folder: [f"vllm (pid 7) ({folder})"])
        monkeypatch.setattr(doctor, "end_left_over", lambda folder: ["ended vllm (pid 7)"])
        named = doctor.left_servers(tmp_path, clean=False)
        assert (named.status, named.hint) == ("note", "autotune doctor --clean ends them")
        assert named.text == f"vllm (pid 7) ({tmp_path / 'night' / 'attempts'})"
        ended = doctor.left_servers(tmp_path, clean=True)
        assert (ended.status, ended.text) == ("ok", "ended vllm (pid 7)")

    def test_that_run_are_found_and_ended(self, tmp_path: Path) -> None:
        folder = tmp_path / "night" / "attempts" / "0003"
        code = (
            "import os\nfrom pathlib import Path\nfrom autotune.engines.process import ServerProcess\n"
            f"s = ServerProcess.start(['sleep', '300'], env=dict(os.environ), folder=Path({str(folder)!r}))\n"
            "print(s.pid, flush=True)\nos._exit(9)\n"
        )
        pid = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout)
        named = doctor.left_servers(tmp_path, clean=False)
        assert (named.status, named.text) == ("note", f"sleep (pid {pid}) ({folder})")
        ended = doctor.left_servers(tmp_path, clean=True)
        assert f"ended sleep (pid {pid})" in ended.text
        assert doctor.left_servers(tmp_path, clean=False).status == "ok"
        status = Path(f"/proc/{pid}/status")
        assert not status.exists() or "State:\tZ" in status.read_text()

    def test_one_that_cannot_be_ended(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "night" / "attempts").mkdir(parents=True)

        def stuck(folder: Path) -> list[str]:
            raise AutotuneError("still there", hint="it waits inside a driver")

        monkeypatch.setattr(doctor, "end_left_over", stuck)
        check = doctor.left_servers(tmp_path, clean=True)
        assert (check.status, check.text, check.hint) == ("note", "still there", "it waits inside a driver")


def test_the_client() -> None:
    check = doctor.client(CEILING)
    assert check.status == "ok"
    assert (
        "512 streams are held at 30,000 output tokens/s (21.0 CPU s per million tokens, loop 12 ms late)" in check.text
    )
    nothing = doctor.client(replace(CEILING, tokens_per_s=None))
    assert nothing.status == "note"
    assert "not held" in nothing.text


class TestExamine:
    def run(self, folder: Path, monkeypatch: pytest.MonkeyPatch, command: str, **changes: Any) -> doctor.Report:
        monkeypatch.setattr(devices, "load_nvml", lambda: FakeNvml([H200, H200]))
        monkeypatch.setattr(devices, "driver_version", lambda: "570.1")
        monkeypatch.setattr(doctor, "client_ceiling", lambda **limits: CEILING)
        environment = {"PATH": os.defpath, "HF_HUB_OFFLINE": "1", "AUTOTUNE_LOCKS": str(folder / "locks")}
        environment |= {"HOME": str(folder), "HF_TOKEN": "hf_verysecret"}
        return examine(command, folder, cpu_limit=0.8, lag_limit_s=0.05, environment=environment, **changes)

    def test_a_host_that_can_search(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        command = str(script(tmp_path, f"#!{a_python(tmp_path, 'echo 0.33.0')}"))
        report = self.run(tmp_path, monkeypatch, command)
        assert report.can_search
        assert [check.name for check in report.checks] == [
            *("vllm", "driver", "GPU 0", "GPU 1", "locks", "studies", "weights", "vLLM's cache", "hub", "open files"),
            *("left-over servers", "client"),
        ]
        assert report.ceiling == CEILING
        data = json.dumps(encode(report))
        assert json.loads(data)["schema"] == "autotune/doctor/1"
        assert "verysecret" not in data

    def test_one_that_cannot(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        report = self.run(tmp_path, monkeypatch, "no-such-program", load=False)
        assert not report.can_search
        assert report.ceiling is None
        assert "client" not in {check.name for check in report.checks}

    def test_a_search_that_runs_is_not_disturbed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AUTOTUNE_LOCKS", str(tmp_path / "locks"))
        (tmp_path / "night").mkdir()
        with (tmp_path / "night" / "lock").open("w") as file:
            file.write(json.dumps({"owner": "a search", "pid": 1, "host": "h", "since": "now"}))
            file.flush()
            fcntl.flock(file, fcntl.LOCK_EX)
            report = self.run(tmp_path, monkeypatch, "no-such-program")
        assert report.ceiling is None
        assert "disturbed" in report.checks[-1].text
