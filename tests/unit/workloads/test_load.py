"""Workloads by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autotune import __version__
from autotune.errors import InputError
from autotune.records.load import Message
from autotune.records.trial import WorkloadSpec
from autotune.workloads import Question, load, parse_name


@pytest.fixture
def spec(tmp_path: Path) -> WorkloadSpec:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps({"id": f"q{n}", "prompt": "x" * (n + 1)}) + "\n" for n in range(30)))
    return WorkloadSpec(name="jsonl", path=str(file))


def test_a_spec_is_read_once_in_a_process(spec: WorkloadSpec) -> None:
    first = load(spec)
    Path(spec.path or "").unlink()
    assert load(replace(spec)) is first


def test_a_limit_takes_a_sample(spec: WorkloadSpec) -> None:
    workload = load(replace(spec, limit=10))
    assert len(workload.questions) == 10
    assert workload.provenance["count"] == 10
    assert workload.provenance["available"] == 30
    assert workload.notes == ()


def test_a_limit_beyond_the_set_is_clipped_with_a_note(spec: WorkloadSpec) -> None:
    clipped, whole = load(replace(spec, limit=100_000)), load(spec)
    assert clipped.questions == whole.questions
    assert clipped.fingerprint == whole.fingerprint
    assert clipped.notes == ("limit 100,000 is more than the 30 questions there are: all are asked",)
    assert load(replace(spec, limit=30)).notes == ()


def test_the_place_of_the_data_is_no_part_of_the_fingerprint(spec: WorkloadSpec, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere.jsonl"
    copy.write_bytes(Path(spec.path or "").read_bytes())
    assert load(replace(spec, path=str(copy))).fingerprint == load(spec).fingerprint


def test_an_unknown_name_lists_the_known_ones() -> None:
    for attempt in (lambda: load(WorkloadSpec(name="gpqa")), lambda: parse_name("gpqa")):
        with pytest.raises(InputError) as caught:
            attempt()
        assert str(caught.value).startswith(
            f"unknown workload 'gpqa': autotune {__version__} knows hle, jsonl, synthetic\nhint: "
        )


@pytest.mark.parametrize("change", [{"limit": 0}, {"limit": -1}, {"max_tokens": 0}])
def test_limits_below_one(spec: WorkloadSpec, change: dict[str, int]) -> None:
    with pytest.raises(InputError, match="must be at least 1"):
        load(replace(spec, **change))


def test_names_and_files(spec: WorkloadSpec, tmp_path: Path) -> None:
    plain = tmp_path / "questions"
    plain.touch()
    assert parse_name("hle") == ("hle", None)
    assert parse_name("synthetic") == ("synthetic", None)
    assert parse_name("-") == ("jsonl", "-")
    assert parse_name("not-there-yet.jsonl") == ("jsonl", "not-there-yet.jsonl")
    assert parse_name(str(plain)) == ("jsonl", str(plain))


def test_a_question_is_asked_one_way() -> None:
    for wrong in ({}, {"prompt": (1,), "messages": (Message(role="user", content="x"),)}):
        with pytest.raises(ValueError, match="exactly one of messages and prompt"):
            Question(id="q", **wrong)
