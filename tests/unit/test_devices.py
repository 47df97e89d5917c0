"""GPUs through a fake NVML, and locks against other processes."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autotune import devices
from autotune.devices import Gpu
from autotune.errors import BusyError, InputError, PrerequisiteError

GIB = 1 << 30


class NvmlError(Exception):
    """As pynvml.NVMLError."""


class FakeNvml:
    """NVML over plain data; ``readings`` are the used bytes of successive looks at GPU 0."""

    NVMLError = NvmlError

    def __init__(self, names: list[str], readings: list[int] | None = None, owners: list[int] | None = None) -> None:
        self.names = names
        self.readings = readings or [0]
        self.owners = owners
        self.lost: set[int] = set()

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.172.08"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.lost:
            raise NvmlError("GPU is lost")
        return index

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        used = 0
        if handle == 0:
            used = self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]
        return SimpleNamespace(total=140 * GIB, used=used)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        if self.owners is None:
            raise NvmlError("not permitted")
        return [SimpleNamespace(pid=pid) for pid in self.owners]

    def nvmlDeviceGetUUID(self, handle: int) -> bytes:
        return f"GPU-{'abcd'[handle]}{handle}{handle}".encode()

    def nvmlDeviceGetName(self, handle: int) -> str:
        return self.names[handle]


H200 = "NVIDIA H200"


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    def no_driver() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", no_driver)
    assert devices.gpus() == ()
    assert devices.driver_version() is None
    assert devices.select(None) == ()
    assert devices.wait_memory_back([make_gpu(0)]) is None
    with pytest.raises(InputError, match="GPU 0, which is not visible"):
        devices.select([0])


def test_nvml_is_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    import pynvml

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    assert devices.load_nvml() is pynvml


def test_gpus_are_read() -> None:
    nvml = FakeNvml([H200, H200], readings=[3 * GIB], owners=[9, 4, 9])
    first, second = devices.gpus(nvml)
    assert first == Gpu(index=0, uuid="GPU-a00", name=H200, total_bytes=140 * GIB, used_bytes=3 * GIB, owners=(4, 9))
    assert (second.index, second.uuid, second.used_bytes) == (1, "GPU-b11", 0)


def test_a_lost_gpu_and_hidden_owners() -> None:
    nvml = FakeNvml([H200, H200, H200])
    nvml.lost = {1}
    assert [(gpu.index, gpu.owners) for gpu in devices.gpus(nvml)] == [(0, ()), (2, ())]


@pytest.mark.parametrize(
    ("value", "indices"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,9,2", [1]),
        ("GPU-c22,GPU-a", [2, 0]),
        ("GPU-,1", []),
        ("1,1,2", [1]),
        (" 3 , 1 ", [3, 1]),
        ("0,,1", [0]),
    ],
)
def test_cuda_visible_devices_as_cuda_reads_it(value: str | None, indices: list[int]) -> None:
    environment = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    chosen = devices.select(None, nvml=FakeNvml([H200] * 4), environment=environment)
    assert [gpu.index for gpu in chosen] == indices


def test_devices_are_chosen_among_the_visible() -> None:
    nvml, environment = FakeNvml([H200] * 4), {"CUDA_VISIBLE_DEVICES": "1,2,3"}
    assert [gpu.index for gpu in devices.select([3, 1], nvml=nvml, environment=environment)] == [3, 1]
    with pytest.raises(InputError, match="GPU 0, which is not visible") as caught:
        devices.select([0], nvml=nvml, environment=environment)
    assert "visible: 1, 2, 3" in str(caught.value)
    with pytest.raises(InputError, match="twice"):
        devices.select([1, 1], nvml=nvml, environment=environment)


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-40GB"),
        ("A100X", "A100"),
        ("Tesla V100-SXM2-32GB", "V100"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert devices.short_name(name) == short


def test_describe() -> None:
    assert devices.describe(devices.gpus(FakeNvml([H200] * 2))) == "2xH200"
    assert devices.describe(devices.gpus(FakeNvml([H200, "NVIDIA L4", H200]))) == "2xH200+1xL4"
    assert devices.describe(()) is None


def make_gpu(used: int, uuid: str = "GPU-a00") -> Gpu:
    return Gpu(index=0, uuid=uuid, name=H200, total_bytes=140 * GIB, used_bytes=used, owners=())


def test_memory_comes_back_late() -> None:
    nvml = FakeNvml([H200], readings=[90 * GIB, 40 * GIB, GIB])
    assert devices.wait_memory_back([make_gpu(GIB)], nvml=nvml, limit_s=5) is None
    assert len(nvml.readings) == 1


def test_memory_of_the_time_before_and_other_gpus_do_not_count() -> None:
    nvml = FakeNvml([H200], readings=[50 * GIB])
    assert devices.wait_memory_back([make_gpu(50 * GIB)], nvml=nvml, limit_s=0) is None
    assert devices.wait_memory_back([make_gpu(0, uuid="gone")], nvml=nvml, limit_s=0) is None
    assert devices.wait_memory_back([], limit_s=0) is None


@pytest.mark.parametrize(("owners", "says"), [([77, 12], "pid 12, pid 77"), ([], "NVML does not show")])
def test_memory_that_does_not_come_back_is_named(owners: list[int], says: str) -> None:
    nvml = FakeNvml([H200], readings=[90 * GIB], owners=owners)
    text = devices.wait_memory_back([make_gpu(10 * GIB)], nvml=nvml, limit_s=0.01)
    assert text is not None
    assert "GPU 0: 80.0 GiB more" in text
    assert says in text


def try_lock(path: Path, answer: Any) -> None:
    try:
        with devices.lock(path, "a second search"):
            answer.put("held")
    except BusyError as error:
        answer.put(str(error))


def elsewhere(target: Callable[..., None], *args: Any) -> Any:
    """The answer of another process."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=target, args=(*args, answer))
    process.start()
    result = answer.get(timeout=60)
    process.join()
    answer.close()
    answer.join_thread()
    return result


def test_a_lock_holds_against_another_process_and_names_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with devices.lock(path, "autotune search of study night"):
        text = elsewhere(try_lock, path)
    assert f"{path} is held by autotune search of study night (pid {os.getpid()} on" in text
    assert "since 20" in text
    assert elsewhere(try_lock, path) == "held"
    assert path.read_text() == ""


def hold_and_die(path: Path, answer: Any) -> None:
    with devices.lock(path, "one that is killed"):
        answer.put(os.getpid())
        answer.close()
        answer.join_thread()
        os._exit(9)


def test_a_lock_vanishes_with_its_process(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    pid = elsewhere(hold_and_die, path)
    assert json.loads(path.read_text())["pid"] == pid
    with devices.lock(path, "the next one"):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def ask_holder(path: Path, answer: Any) -> None:
    answer.put(devices.holder(path))


def test_who_holds_a_lock_is_told_without_touching_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert devices.holder(path) is None
    with devices.lock(path, "autotune search of study night"):
        before = path.read_text()
        assert elsewhere(ask_holder, path).startswith(f"autotune search of study night (pid {os.getpid()} on")
        assert path.read_text() == before
        assert elsewhere(try_lock, path) != "held"
    assert devices.holder(path) is None
    # One that was killed leaves its name behind, but no lock.
    elsewhere(hold_and_die, path)
    assert devices.holder(path) is None


def test_the_version_of_the_driver() -> None:
    assert devices.driver_version(FakeNvml([])) == "570.172.08"


def test_a_holder_who_has_not_written_yet(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(BusyError, match="another process"), devices.lock(path, "me"):
            pass


def test_the_lock_is_released_by_an_error(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with pytest.raises(KeyError), devices.lock(path, "me"):
        raise KeyError
    with devices.lock(path, "me again"):
        pass


def test_a_lock_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PrerequisiteError, match="cannot make the lock"), devices.lock(tmp_path / "no" / "lock", "me"):
        pass
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PrerequisiteError, match="cannot make the lock"), devices.lock(tmp_path / "link", "me"):
        pass

    def no_locks(file: Any, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pytest.raises(PrerequisiteError, match="has no locks: No locks available"), devices.lock(tmp_path / "l", "me"):
        pass


def test_a_full_disk_does_not_undo_a_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with devices.lock(tmp_path / "lock", "me"):
        assert (tmp_path / "lock").exists()


def test_two_make_the_same_lock_file_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock"
    real, calls = os.open, []

    def racing(name: Path, flags: int, mode: int = 0o777) -> int:
        calls.append(flags)
        if len(calls) == 1:
            raise FileNotFoundError(2, "not yet")
        if len(calls) == 2:
            open(path, "w").close()  # the other one
        return real(name, flags, mode)

    monkeypatch.setattr(os, "open", racing)
    with devices.lock(path, "me"):
        pass
    assert len(calls) == 3


def test_lock_files_are_for_all_users(tmp_path: Path) -> None:
    mask = os.umask(0o077)
    try:
        with devices.lock(tmp_path / "lock", "me"):
            pass
    finally:
        os.umask(mask)
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o666


def test_the_folder_of_gpu_locks_is_one_for_all_users(tmp_path: Path) -> None:
    folder = devices.lock_folder({"AUTOTUNE_LOCKS": str(tmp_path / "locks")})
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    assert devices.lock_folder({"AUTOTUNE_LOCKS": str(folder)}) == folder
    assert devices.LOCK_FOLDER.is_absolute()


def test_a_folder_that_is_a_link_or_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name in ("file", "link"):
        with pytest.raises(PrerequisiteError, match="cannot use") as caught:
            devices.lock_folder({"AUTOTUNE_LOCKS": str(tmp_path / name)})
        assert "AUTOTUNE_LOCKS" in str(caught.value)


def try_gpu(folder: Path, answer: Any) -> None:
    os.environ["AUTOTUNE_LOCKS"] = str(folder)
    try:
        with devices.lock_gpu(make_gpu(0), "a second search"):
            answer.put("held")
    except BusyError as error:
        answer.put(f"{error.exit_code} {error}")


def test_a_gpu_is_locked_for_everybody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOTUNE_LOCKS", str(tmp_path / "locks"))
    with devices.lock_gpu(make_gpu(0), "study night"), devices.lock_gpu(make_gpu(0, uuid="other"), "study night"):
        text = elsewhere(try_gpu, tmp_path / "locks")
    assert text.startswith("5 GPU 0 (GPU-a00) is held by study night (pid ")
    assert "--devices" in text


def test_the_room_needs_no_gpu_library_to_be_imported() -> None:
    assert "pynvml" not in Path(sys.modules["autotune.devices"].__file__ or "").read_text().split("def load_nvml")[0]
