from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from autotune.errors import InputError, PrerequisiteError
from autotune.search.folder import StudyFolder, append_line, mend_torn_line, newest_study, write_whole
from autotune.spec import StudySpec
from tests.unit.search.results import result


def test_trials_are_appended_and_read_back(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path / "s")
    folder.create()
    assert folder.trials() == []
    first, second = result(0, 100.0), result(1, None)
    folder.append_trial(first)
    folder.append_trial(second)
    assert folder.trials() == [first, second]
    assert "!winner.json" in (folder.path / ".gitignore").read_text()


def test_a_torn_last_line_is_survived_and_kept_beside(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path / "s")
    folder.create()
    folder.append_trial(result(0, 100.0))
    whole = folder.trials_file.read_bytes()
    for cut in (1, 20, len(whole) // 2):
        folder.trials_file.write_bytes(whole + whole[:cut])
        assert [r.number for r in folder.trials()] == [0]
        folder.append_trial(result(1, 50.0))
        assert [r.number for r in folder.trials()] == [0, 1]
        assert folder.trials_file.with_name("trials.jsonl.torn").read_bytes() == whole[:cut]


def test_a_torn_line_cut_inside_a_character_is_survived(tmp_path: Path) -> None:
    path = tmp_path / "trials.jsonl"
    path.write_bytes('{"a": "ä'.encode()[:-1])
    mend_torn_line(path)
    assert path.read_bytes() == b""


def test_a_broken_line_in_the_middle_is_told(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path / "s")
    folder.create()
    folder.trials_file.write_text("{}\n{}\n")
    with pytest.raises(InputError, match=r"trials.jsonl:1: not a TrialResult"):
        folder.trials()


def test_write_whole_leaves_the_old_text_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "winner.json"
    write_whole(path, "old\n")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(PrerequisiteError, match="no space left") as caught:
        write_whole(path, "new")
    assert caught.value.exit_code == 2
    with pytest.raises(PrerequisiteError, match="no space left"):
        append_line(path, "more")
    assert path.read_text() == "old\n"
    assert [p.name for p in tmp_path.iterdir() if not p.name.endswith(".torn")] == ["winner.json"]


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PrerequisiteError, match="cannot write"):
        StudyFolder(tmp_path / "file" / "s").create()


def test_the_newest_study_is_the_one_worked_on_last(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no study"):
        newest_study(tmp_path)
    for age, name in ((100, "b"), (50, "a")):
        folder = StudyFolder(tmp_path / name)
        folder.create()
        folder.write_spec(StudySpec(model="m"))
        for path in folder.path.iterdir():
            os.utime(path, (time.time() - age, time.time() - age))
    assert newest_study(tmp_path).name == "a"
    (tmp_path / "b" / "trials.jsonl").write_text("")
    assert newest_study(tmp_path).name == "b"


def test_the_spec_is_stored_and_read(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path / "s")
    folder.create()
    assert folder.read_spec() is None
    spec = StudySpec(model="m", space={"max_num_seqs": [1, 2]}, budget_s=60.0)
    folder.write_spec(spec)
    assert folder.read_spec() == spec


def test_no_winner_yet_and_a_changed_winner_are_told(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path / "s")
    folder.create()
    with pytest.raises(InputError, match="no winner yet"):
        folder.read_winner()
    folder.winner_file.write_text("{}")
    with pytest.raises(InputError, match="not a winner record"):
        folder.read_winner()
