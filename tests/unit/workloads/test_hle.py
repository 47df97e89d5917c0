"""The loader of the real data set, on made-up rows in its schema."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from autotune.errors import InputError, PrerequisiteError
from autotune.records.trial import WorkloadSpec
from autotune.workloads import hle
from autotune.workloads.quiet import quiet
from tests.unit.workloads import parquet
from tests.unit.workloads.fake_hub import COMMIT, serving

SECRET = "hf_ThisIsASecretThatNobodyMayRead"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parquet.write(tmp_path_factory.mktemp("hle"), parquet.rows())


def spec(path: Path | None, **options: Any) -> WorkloadSpec:
    return WorkloadSpec(name="hle", path=None if path is None else str(path), **options)


def test_text_only_questions_of_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet():
        import datasets

    def decode(*_: object, **__: object) -> None:
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(datasets.Image, "decode_example", decode)
    source = hle.read(spec(folder))
    assert [q.id for q in source.questions] == [f"{n:024x}" for n in range(26)]
    assert dict(source.provenance) == {
        "source": str(folder),
        "revision": source.provenance["revision"],
        "rows": 30,
        "with_image": 3,
        "repeated_ids": 1,
        "licence": hle.LICENCE,
        "split": "test",
    }
    assert str(source.provenance["revision"]).startswith("sha256:")
    assert source.notes == (f"{folder}: 1 rows repeat an id and are left out",)
    assert source.questions[3].messages[1].content.startswith("How many beads"), "the first of a repeated id stays"
    assert max(len(q.messages[1].content) for q in source.questions) == parquet.LONGEST
    assert Counter(q.category for q in source.questions)["Engineering"] == 1
    assert {q.answer for q in source.questions} == {str(2 * n + 1) for n in range(26)}


def test_both_spellings_of_the_answer_type_get_their_own_prompt(folder: Path) -> None:
    questions = hle.read(spec(folder)).questions
    assert Counter(q.answer_type for q in questions) == {"exact_match": 14, "multiple_choice": 12}
    for question in questions:
        system, user = question.messages
        assert (system.role, user.role) == ("system", "user")
        assert system.content == hle.SYSTEM_PROMPTS[question.answer_type or ""]
        labels = [line.split(":")[0] for line in system.content.splitlines()[1:]]
        answer = "Exact Answer" if question.answer_type == "exact_match" else "Answer"
        assert labels == ["Explanation", answer, "Confidence"]


def test_official_prompt_is_one_for_all(folder: Path) -> None:
    systems = {q.messages[0].content for q in hle.read(spec(folder, official_prompt=True)).questions}
    assert systems == {hle.OFFICIAL_PROMPT}


def test_the_canary_is_nowhere(folder: Path) -> None:
    assert parquet.CANARY not in repr(hle.read(spec(folder)))


def test_one_file_and_odd_folder_names(tmp_path: Path) -> None:
    odd = parquet.write(tmp_path / "gl[ob]* ?x", [parquet.row(1)])
    file = odd / "data" / "test-00000-of-00001.parquet"
    first, second = hle.read(spec(odd)), hle.read(spec(file))
    assert first.questions == second.questions
    assert first.provenance["revision"] == second.provenance["revision"]


def test_several_files_of_the_test_split_only(tmp_path: Path) -> None:
    for number, name in enumerate(("test-0.parquet", "test-1.parquet", "train-0.parquet")):
        parquet.write(tmp_path, [parquet.row(number)], name=name)
    assert [q.id for q in hle.read(spec(tmp_path)).questions] == [f"{0:024x}", f"{1:024x}"]


def test_a_mirror_with_undecoded_images_and_odd_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "IMAGES", ("image", *parquet.IMAGES))
    rows = [
        parquet.row(0, image=parquet.NOT_AN_IMAGE),
        parquet.row(1, image=None, answer_type="essay", category="", answer=None),
        parquet.row(2, image={"bytes": None, "path": None}, answer_type=None),
    ]
    source = hle.read(spec(parquet.write(tmp_path, rows)))
    assert [(q.id[-1], q.answer_type) for q in source.questions] == [("1", "exact_match"), ("2", "exact_match")]
    assert source.questions[0].category is None
    assert source.questions[0].answer is None
    assert source.notes == (f"{tmp_path}: 2 questions of an unknown answer_type are asked for an exact answer",)


def lfs_pointer(folder: Path) -> None:
    (folder / "test.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def broken(folder: Path) -> None:
    (folder / "test.parquet").write_bytes(b"PAR1" + b"x" * 100 + b"PAR1")


def other_columns(folder: Path) -> None:
    parquet.write(folder, [{"id": "1", "prompt": "What?"}])


def images_only(folder: Path) -> None:
    parquet.write(folder, [parquet.row(0, image=parquet.DATA_URI)])


def no_question(folder: Path) -> None:
    parquet.write(folder, [parquet.row(0), parquet.row(1, question=None)])


def no_id(folder: Path) -> None:
    parquet.write(folder, [parquet.row(0, id=" ")])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: None, "there is no parquet file in it"),
        (lambda folder: folder.rmdir(), "there is no such folder"),
        (lfs_pointer, "git lfs pull"),
        (broken, "cannot be read as parquet"),
        (other_columns, "without the columns question, image, answer, answer_type, category"),
        (images_only, "none of its 1 rows is a question without an image"),
        (no_question, "row 1: question must be text"),
        (no_id, "row 0: id must be text"),
    ],
)
def test_a_folder_that_is_something_else(tmp_path: Path, make: Any, says: str) -> None:
    folder = tmp_path / "data set"
    folder.mkdir()
    make(folder)
    with pytest.raises(InputError) as caught:
        hle.read(spec(folder))
    assert says in str(caught.value)
    assert caught.value.hint


def test_a_folder_called_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "test.parquet").mkdir()
    with pytest.raises(InputError, match=r"cannot be read: .*Is a directory"):
        hle.read(spec(tmp_path))


def test_an_impossible_path() -> None:
    with pytest.raises(InputError, match="no such folder"):
        hle.read(WorkloadSpec(name="hle", path="nul\0byte"))


READ = """
import json
from autotune.errors import PrerequisiteError
from autotune.records.trial import WorkloadSpec
from autotune.workloads import load
try:
    workload = load(WorkloadSpec(name="hle"))
    print(json.dumps([dict(workload.provenance), [q.id for q in workload.questions]]))
except PrerequisiteError as error:
    print(error.exit_code, error)
"""


def read_from_hub(home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the libraries read the hub's address when they are imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    done = subprocess.run(
        [sys.executable, "-c", READ],
        env={**kept, "HF_HOME": str(home), **environment},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stderr == ""
    assert SECRET not in done.stdout
    return done


def test_from_a_hub_then_offline_from_the_cache(tmp_path: Path) -> None:
    data = parquet.write(tmp_path / "made", parquet.rows()) / "data" / "test-00000-of-00001.parquet"
    with serving(hle.DATASET, parquet=data.read_bytes()) as address:
        online = read_from_hub(tmp_path, HF_ENDPOINT=address, HF_TOKEN=SECRET)
    provenance, ids = json.loads(online.stdout)
    assert provenance["revision"] == COMMIT
    assert provenance["source"] == "cais/hle"
    assert (provenance["rows"], provenance["with_image"], provenance["count"]) == (30, 3, 26)
    assert len(ids) == 26
    assert read_from_hub(tmp_path, HF_HUB_OFFLINE="1").stdout == online.stdout


@pytest.mark.parametrize(
    ("refusal", "token", "says"),
    [
        ((401, "GatedRepo"), None, "gated and nobody is logged in here"),
        ((403, "GatedRepo"), SECRET, "the token in use has no access"),
        ((404, "RepoNotFound"), SECRET, "the hub does not show it to this account"),
    ],
)
def test_a_hub_that_refuses(tmp_path: Path, refusal: tuple[int, str], token: str | None, says: str) -> None:
    with serving(hle.DATASET, refusal=refusal) as address:
        told = read_from_hub(tmp_path, HF_ENDPOINT=address, **({"HF_TOKEN": token} if token else {})).stdout
    assert told.startswith("2 ")
    assert says in told
    assert "https://huggingface.co/datasets/cais/hle" in told
    assert "--workload FILE.jsonl" in told
    assert "--lengths FILE" in told


def test_offline_without_a_cache(tmp_path: Path) -> None:
    told = read_from_hub(tmp_path, HF_HUB_OFFLINE="1", HF_TOKEN=SECRET).stdout
    assert told.startswith("2 ")
    assert "the hub cannot be reached" in told
    assert "--dataset-path FOLDER" in told


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "no room left on the disk"),
        (OSError("Not enough disk space. Needed: 1 GB"), "no room left on the disk"),
        (ConnectionError(f"Couldn't reach the hub with {SECRET}"), "cannot be reached"),
        (RuntimeError("Client error '401 Unauthorized' for url"), "gated"),
    ],
)
def test_other_failures_of_a_download(monkeypatch: pytest.MonkeyPatch, error: Exception, says: str) -> None:
    with quiet():
        import datasets

    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(PrerequisiteError) as caught:
        hle.read(spec(None))
    assert says in caught.value.message
    assert SECRET not in str(caught.value)


def test_a_revision_without_a_commit_is_the_library_s_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    with quiet():
        import datasets

    made = datasets.Dataset.from_list([{name: "" if name == "image" else "x" for name in hle.COLUMNS}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: made)
    assert hle.read(spec(None)).provenance["revision"] == f"fingerprint {made._fingerprint}"
