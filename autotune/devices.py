"""Which GPUs are here, who uses their memory, and locks on them and on studies (the only room that knows NVML)."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from autotune.errors import BusyError, InputError, PrerequisiteError

LOCK_FOLDER = Path("/tmp/autotune-locks")
"""One folder for all users of the host; ``AUTOTUNE_LOCKS`` names another."""
SLACK_BYTES = 512 << 20
"""Memory counts as back when it is within this of the reading before the start: contexts of others come and go."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU as NVML shows it."""

    index: int
    """As in ``nvidia-smi``."""
    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    owners: tuple[int, ...]
    """Process ids that hold memory on it; may be incomplete in a container."""


def load_nvml() -> Any | None:
    """NVML ready for use, or ``None`` where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def gpus(nvml: Any | None = None) -> tuple[Gpu, ...]:
    """All GPUs of the host, in the order of ``nvidia-smi``; none without a driver."""
    nvml = nvml or load_nvml()
    if nvml is None:
        return ()
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            found.append(_read(nvml, index))
        except nvml.NVMLError:  # lost, or taken away from this container
            continue
    return tuple(found)


def driver_version(nvml: Any | None = None) -> str | None:
    """Version of the NVIDIA driver; ``None`` without one."""
    nvml = nvml or load_nvml()
    return None if nvml is None else _text(nvml.nvmlSystemGetDriverVersion())


def _read(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        owners = tuple(sorted({p.pid for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}))
    except nvml.NVMLError:  # not permitted, or not supported in this container
        owners = ()
    return Gpu(
        index=index,
        uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
        name=_text(nvml.nvmlDeviceGetName(handle)),
        total_bytes=int(memory.total),
        used_bytes=int(memory.used),
        owners=owners,
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def visible(all_gpus: Sequence[Gpu], environment: Mapping[str, str] | None = None) -> tuple[Gpu, ...]:
    """Those that ``CUDA_VISIBLE_DEVICES`` leaves, in its order; all where it is not set.

    As CUDA reads it: indices, UUIDs or beginnings of UUIDs; what follows the first entry that names no GPU is
    not seen. MIG instances are not GPUs of their own here.
    """
    value = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return tuple(all_gpus)
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in value.split(",")):
        matches = [gpu for gpu in all_gpus if entry and (str(gpu.index) == entry or gpu.uuid.startswith(entry))]
        if len(matches) != 1 or matches[0] in chosen:
            break
        chosen.append(matches[0])
    return tuple(chosen)


def select(
    devices: Sequence[int] | None, *, nvml: Any | None = None, environment: Mapping[str, str] | None = None
) -> tuple[Gpu, ...]:
    """The GPUs of ``--devices``, or all that are visible.

    Raises:
        InputError: a GPU that is not there, is named twice, or is hidden by ``CUDA_VISIBLE_DEVICES``.
    """
    seen = visible(gpus(nvml), environment)
    if devices is None:
        return seen
    by_index = {gpu.index: gpu for gpu in seen}
    for index in devices:
        if index not in by_index:
            raise InputError(
                f"--devices names GPU {index}, which is not visible here",
                hint=f"visible: {', '.join(map(str, by_index)) or 'none'} (numbers as in nvidia-smi)",
            )
    if len(set(devices)) != len(devices):
        raise InputError(f"--devices names a GPU twice: {','.join(map(str, devices))}")
    return tuple(by_index[index] for index in devices)


def describe(chosen: Sequence[Gpu]) -> str | None:
    """``8xH200``; ``4xH200+2xA100`` for a mixture; ``None`` without a GPU."""
    counts = Counter(short_name(gpu.name) for gpu in chosen)
    return "+".join(f"{count}x{name}" for name, count in counts.items()) or None


def short_name(name: str) -> str:
    """``NVIDIA H100 80GB HBM3`` -> ``H100``, ``NVIDIA A100-SXM4-80GB`` -> ``A100-80GB``."""
    plain = re.sub(r"^(NVIDIA|Tesla|GeForce|\s)+", "", name)
    if plain.startswith("A100"):  # the one name that two memory sizes share
        size = re.search(r"\d+GB", plain)
        return f"A100-{size[0]}" if size else "A100"
    model = re.match(r"[A-Z]{1,2}\d+[A-Za-z]*\b", plain)
    return model[0] if model else plain


def wait_memory_back(before: Sequence[Gpu], *, limit_s: float = 60.0, nvml: Any | None = None) -> str | None:
    """Wait until each GPU uses no more than ``before`` (the driver frees after the process is gone).

    Returns:
        ``None``, or after ``limit_s`` a sentence that says what is still taken, and by whom.
    """
    nvml = nvml or (load_nvml() if before else None)
    if nvml is None:
        return None
    deadline = time.monotonic() + limit_s
    while True:
        now = {gpu.uuid: gpu for gpu in gpus(nvml)}
        taken = [
            (now[old.uuid], now[old.uuid].used_bytes - old.used_bytes)
            for old in before
            if old.uuid in now and now[old.uuid].used_bytes > old.used_bytes + SLACK_BYTES
        ]
        if not taken:
            return None
        if time.monotonic() >= deadline:
            parts = [
                f"GPU {gpu.index}: {extra / 2**30:.1f} GiB more than before the start, "
                f"held by {', '.join(f'pid {pid}' for pid in gpu.owners) or 'a process that NVML does not show'}"
                for gpu, extra in taken
            ]
            return f"GPU memory is not back {limit_s:.0f} s after the server ended; " + "; ".join(parts)
        time.sleep(min(0.25, max(0.0, deadline - time.monotonic())))


@contextmanager
def lock(path: Path, owner: str, *, what: str | None = None, hint: str = "wait for it, or end it") -> Iterator[None]:
    """Hold a lock file while the block runs; it vanishes with the process, however that ends.

    Args:
        path: made where it is missing, open to all users.
        owner: who holds it, in words, for the one who comes second.
        what: what is held, in words; ``None``: the path.
        hint: what the one who comes second can do.

    Raises:
        BusyError: somebody else holds it; the message names them, their process and since when.
        PrerequisiteError: the file cannot be made, or its file system has no locks.
    """
    try:
        descriptor = _open_shared(path)
    except OSError as error:
        raise PrerequisiteError(f"cannot make the lock {path}: {error.strerror}") from error
    with open(descriptor, "r+", encoding="utf-8", errors="replace") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(f"{what or path} is held by {_holder(file)}", hint=hint) from None
        except OSError as error:
            raise PrerequisiteError(
                f"the file system of {path} has no locks: {error.strerror}", hint="use a local disk"
            ) from error
        _write_owner(file, {"owner": owner, "pid": os.getpid(), "host": os.uname().nodename, "since": _now()})
        try:
            yield
        finally:
            _write_owner(file, {})


@contextmanager
def lock_gpu(gpu: Gpu, owner: str) -> Iterator[None]:
    """Hold one GPU for this process, against every other autotune on the host.

    Raises:
        BusyError: another one holds it; says who and since when.
    """
    path = lock_folder() / f"{gpu.uuid}.lock"
    hint = "wait for it, or choose other GPUs with --devices"
    with lock(path, owner, what=f"GPU {gpu.index} ({gpu.uuid})", hint=hint):
        yield


def holder(path: Path) -> str | None:
    """Who holds a lock file now, in words; ``None``: nobody. Only looks: a free lock is not taken, nor written."""
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as file:
        if file.read(1):  # whoever held it last has emptied it
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _holder(file)
    return None


def lock_folder(environment: Mapping[str, str] | None = None) -> Path:
    """The folder of GPU locks, made where it is missing, open to all users.

    Raises:
        PrerequisiteError: it cannot be made, or is no folder of its own (a link that somebody placed there).
    """
    given = (os.environ if environment is None else environment).get("AUTOTUNE_LOCKS")
    folder = Path(given) if given else LOCK_FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        status = folder.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "not a folder")
        if status.st_uid == os.getuid() and stat.S_IMODE(status.st_mode) != 0o1777:
            folder.chmod(0o1777)
    except OSError as error:
        raise PrerequisiteError(
            f"cannot use {folder} for GPU locks: {error.strerror}", hint="AUTOTUNE_LOCKS names another folder"
        ) from error
    return folder


def _open_shared(path: Path) -> int:
    """Open without O_CREAT first: in a sticky folder Linux refuses O_CREAT on the file of another user."""
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        pass
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:  # somebody was faster
        return os.open(path, flags)
    os.fchmod(descriptor, 0o666)  # whatever the umask
    return descriptor


def _write_owner(file: TextIO, owner: Mapping[str, object]) -> None:
    """Who holds it is for the reader only: the lock also holds on a disk that is full."""
    try:
        file.seek(0)
        file.truncate()
        if owner:
            json.dump(owner, file)
        file.flush()
    except OSError:
        return


def _holder(file: TextIO) -> str:
    for _ in range(10):  # the holder may be about to write
        file.seek(0)
        try:
            data = json.loads(file.read())
            return f"{data['owner']} (pid {data['pid']} on {data['host']}, since {data['since']})"
        except (ValueError, KeyError, TypeError):
            time.sleep(0.01)
    return "another process"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
