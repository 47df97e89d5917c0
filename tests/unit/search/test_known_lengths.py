from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autotune.errors import InputError
from autotune.evaluation.probe import lengths_fingerprint
from autotune.records.lengths import AnswerLength, Lengths
from autotune.search.folder import StudyFolder
from autotune.search.known_lengths import KnownLengths, given_lengths, study_lengths
from autotune.spec import StudySpec, parse_study
from autotune.workloads import load

ANSWERS = tuple(AnswerLength(tokens=10 * i, ended=True) for i in range(1, 9))


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two"}\n')
    return path


def spec_of(questions: Path, **changes: Any) -> StudySpec:
    return parse_study(
        {"model": "a/b", "workload": {"name": "jsonl", "path": str(questions), "max_tokens": 100}, **changes}
    )


def found(spec: StudySpec) -> Lengths:
    fingerprint = lengths_fingerprint(spec.model, load(spec.workload))
    return Lengths(prompt_tokens=(3, 3), answers=ANSWERS, max_tokens=100, source="probe", fingerprint=fingerprint)


def test_a_law_by_name_or_a_file_is_given(tmp_path: Path) -> None:
    assert given_lengths(None) == KnownLengths()
    assert given_lengths("hle-reasoning") == KnownLengths(law="hle-reasoning")
    (tmp_path / "lengths.txt").write_text("100\n200\n300\n")
    known = given_lengths(str(tmp_path / "lengths.txt"))
    assert known.lengths is not None
    assert [a.tokens for a in known.lengths.answers] == [100, 200, 300]
    with pytest.raises(InputError, match=r"cannot read lengths from .*none") as caught:
        given_lengths(str(tmp_path / "none"))
    assert "hle-reasoning" in (caught.value.hint or "")


def test_what_is_given_goes_before_what_was_found(questions: Path, tmp_path: Path) -> None:
    spec = spec_of(questions, lengths="hle-reasoning")
    folder = StudyFolder(tmp_path / "studies" / "a")
    folder.write_lengths(found(spec))
    assert study_lengths(spec, folder) == KnownLengths(law="hle-reasoning")


def test_lengths_are_found_again_in_this_study_and_in_its_neighbours(questions: Path, tmp_path: Path) -> None:
    spec = spec_of(questions)
    here, there = StudyFolder(tmp_path / "studies" / "a"), StudyFolder(tmp_path / "studies" / "b")
    assert study_lengths(spec, here) == KnownLengths()
    there.write_lengths(found(spec))
    known = study_lengths(spec, here)
    assert known.lengths == found(spec)
    assert str(there.lengths_file) in (known.text or "")
    here.write_lengths(found(spec))
    assert str(here.lengths_file) in (study_lengths(spec, here).text or "")


def test_other_models_questions_limits_and_torn_files_are_not_taken(questions: Path, tmp_path: Path) -> None:
    spec = spec_of(questions)
    here, there = StudyFolder(tmp_path / "studies" / "a"), StudyFolder(tmp_path / "studies" / "b")
    there.write_lengths(found(spec))
    assert study_lengths(spec.model_copy(update={"model": "a/c"}), here) == KnownLengths()
    longer = spec_of(questions, workload={"name": "jsonl", "path": str(questions), "max_tokens": 200})
    assert study_lengths(longer, here) == KnownLengths()
    there.lengths_file.write_text('{"schema": "autotune/lengths/1", "prompt')
    assert study_lengths(spec, here) == KnownLengths()


def test_requests_of_their_own_lengths_need_none(tmp_path: Path, questions: Path) -> None:
    here = StudyFolder(tmp_path / "studies" / "a")
    here.write_lengths(found(spec_of(questions)))
    synthetic = parse_study({"model": "a/b", "workload": {"name": "synthetic"}})
    assert study_lengths(synthetic, here) == KnownLengths()
