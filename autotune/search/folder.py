"""The study folder: every file is written whole or appended whole, and read so that a torn end is survived."""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from autotune.errors import InputError, PrerequisiteError
from autotune.records.codec import RecordError, decode, dumps, loads
from autotune.records.lengths import Lengths
from autotune.records.trial import TrialResult
from autotune.records.winner import Winner
from autotune.spec import StudySpec, parse_study

T = TypeVar("T")

GITIGNORE = "*\n!.gitignore\n!winner.json\n!lengths.json\n!trials.jsonl\n"
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class StudyFolder:
    """``studies/NAME/``: paths, and whole-file reading and writing.

    Raises:
        PrerequisiteError: the disk is full, or the folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def name(self) -> str:
        """Name of the study."""
        return self.path.name

    @property
    def journal(self) -> Path:
        """Optuna's journal."""
        return self.path / "journal.log"

    @property
    def trials_file(self) -> Path:
        """One ``TrialResult`` a line."""
        return self.path / "trials.jsonl"

    @property
    def winner_file(self) -> Path:
        """The winner so far."""
        return self.path / "winner.json"

    @property
    def spec_file(self) -> Path:
        """The resolved study, defaults included."""
        return self.path / "study.json"

    @property
    def lock_file(self) -> Path:
        """Held by the one search that works on the study."""
        return self.path / "lock"

    @property
    def lengths_file(self) -> Path:
        """Lengths of prompts and answers, numbers only."""
        return self.path / "lengths.json"

    @property
    def answers(self) -> Path:
        """Answers with their text: the probe's, the run's."""
        return self.path / "answers"

    @property
    def attempts(self) -> Path:
        """One folder an attempt: server.log, process.json, observations."""
        return self.path / "attempts"

    def attempt(self, number: int) -> Path:
        """Folder of one trial's attempt."""
        return self.attempts / f"{number:04d}"

    def create(self) -> None:
        """Make the folder; only results that are worth it can be committed to git from it."""
        try:
            self.attempts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.path, error) from None
        if not (self.path / ".gitignore").exists():
            write_whole(self.path / ".gitignore", GITIGNORE)

    def write_spec(self, spec: StudySpec) -> None:
        """Store the resolved study."""
        write_whole(self.spec_file, json.dumps({"schema": "autotune/study/1", **spec.to_data()}, indent=2) + "\n")

    def read_spec(self) -> StudySpec | None:
        """The stored study; ``None`` before the first search."""
        if not self.spec_file.exists():
            return None
        data = json.loads(self.spec_file.read_text(encoding="utf-8"))
        return parse_study({k: v for k, v in data.items() if k != "schema"}, source=str(self.spec_file))

    def append_trial(self, result: TrialResult) -> None:
        """Add one line to ``trials.jsonl``."""
        append_line(self.trials_file, dumps(result))

    def trials(self) -> list[TrialResult]:
        """All finished trials in the order in which they ended; a torn last line is left out."""
        return list(read_lines(self.trials_file, TrialResult))

    def write_lengths(self, lengths: Lengths) -> None:
        """Replace ``lengths.json``."""
        write_whole(self.lengths_file, dumps(lengths) + "\n")

    def read_lengths(self) -> Lengths | None:
        """What a probe of this study found; ``None``: nothing, or no such record (written by hand)."""
        try:
            return loads(Lengths, self.lengths_file.read_text(encoding="utf-8"))
        except (OSError, RecordError, UnicodeDecodeError):
            return None

    def write_winner(self, winner: Winner) -> None:
        """Replace ``winner.json``."""
        write_whole(self.winner_file, dumps(winner, indent=2) + "\n")

    def read_winner(self) -> Winner:
        """The winner.

        Raises:
            InputError: there is none yet, or the file was changed by hand into something else.
        """
        try:
            return loads(Winner, self.winner_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(
                f"study {self.name} has no winner yet: {self.winner_file} does not exist",
                hint="run `autotune search` until a stable trial is found; `autotune report` shows what happened",
            ) from None
        except RecordError as error:
            raise InputError(f"{self.winner_file} is not a winner record: {error}") from None


def newest_study(root: Path) -> StudyFolder:
    """The study under ``root`` that was worked on last.

    Raises:
        InputError: there is none.
    """
    found = [path.parent for path in root.glob("*/study.json")]
    if not found:
        raise InputError(f"there is no study under {root}", hint="run `autotune search --model MODEL` first")
    return StudyFolder(max(found, key=lambda path: max(p.stat().st_mtime for p in path.iterdir())))


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, sees the old text or the new one, never a part.

    Raises:
        PrerequisiteError: the disk is full or the folder cannot be written.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False
        ) as file:
            temporary = Path(file.name)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)
        temporary.replace(path)
    except OSError as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        raise _unwritable(path, error) from None


def append_line(path: Path, line: str) -> None:
    """Append one line in one write, after mending a torn last line.

    Raises:
        PrerequisiteError: the disk is full or the folder cannot be written; the file is as before.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mend_torn_line(path)
        with path.open("ab", buffering=0) as file:
            before = file.tell()
            data = (line + "\n").encode()
            try:
                if file.write(data) != len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(file.fileno())
            except OSError:
                file.truncate(before)
                raise
    except OSError as error:
        raise _unwritable(path, error) from None


def mend_torn_line(path: Path) -> None:
    """Cut off a last line without an end: what a killed writer left; kept beside as ``NAME.torn``."""
    if not path.exists() or path.stat().st_size == 0:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) == b"\n":
            return
        file.seek(0)
        content = file.read()
        keep = content.rfind(b"\n") + 1
        path.with_name(path.name + ".torn").write_bytes(content[keep:])
        file.truncate(keep)


def read_lines(path: Path, cls: type[T]) -> Iterator[T]:
    """Records of a JSONL file; a torn last line is left out.

    Raises:
        InputError: a line in the middle is no such record.
    """
    if not path.exists():
        return
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            data: Any = json.loads(line)
            yield decode(cls, data)
        except (RecordError, json.JSONDecodeError, UnicodeDecodeError) as error:
            if number == len(lines):
                return
            raise InputError(f"{path}:{number}: not a {cls.__name__} record: {error}") from None


def _unwritable(path: Path, error: OSError) -> PrerequisiteError:
    if error.errno in NO_SPACE:
        return PrerequisiteError(
            f"no space left to write {path} ({os.strerror(error.errno or 0)})",
            hint="free disk space and run the same command again: finished trials are kept",
        )
    return PrerequisiteError(f"cannot write {path}: {error.strerror}", hint="check the folder's permissions")
