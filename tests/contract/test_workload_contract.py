"""What every workload keeps; a new one adds a class of a few lines."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.records.codec import dumps
from autotune.records.trial import WorkloadSpec
from autotune.workloads import READERS, load
from autotune.workloads.requests import plan_requests
from tests.unit.workloads import parquet

MAX_TOKENS = 300


class WorkloadContract:
    """Subclasses give ``spec`` (at least 20 questions) and ``other`` (the same with other content)."""

    @pytest.fixture
    def spec(self, tmp_path: Path) -> WorkloadSpec:
        raise NotImplementedError

    @pytest.fixture
    def other(self, tmp_path: Path) -> WorkloadSpec:
        raise NotImplementedError

    def test_ids_are_unique_and_every_question_says_something(self, spec: WorkloadSpec) -> None:
        questions = load(spec).questions
        assert len({q.id for q in questions}) == len(questions) >= 20
        assert all(q.size > 0 for q in questions)

    def test_content_is_plain_text(self, spec: WorkloadSpec) -> None:
        assert all(isinstance(m.content, str) for q in load(spec).questions for m in q.messages)

    def test_the_same_in_another_process(self, spec: WorkloadSpec) -> None:
        code = (
            "import sys\n"
            "from autotune.records.codec import loads\n"
            "from autotune.records.trial import WorkloadSpec\n"
            "from autotune.workloads import load\n"
            "workload = load(loads(WorkloadSpec, sys.argv[1]))\n"
            "print(workload.fingerprint, *(q.id for q in workload.questions))\n"
        )
        limited = replace(spec, limit=12)
        done = subprocess.run(
            [sys.executable, "-c", code, dumps(limited)], capture_output=True, text=True, timeout=60, check=True
        )
        here = load(limited)
        assert done.stdout.split() == [here.fingerprint, *(q.id for q in here.questions)]
        assert done.stderr == ""

    @pytest.mark.parametrize(
        "change",
        [
            {"seed": 1},
            {"limit": 10},
            {"limit": 10, "seed": 1},
            {"max_tokens": MAX_TOKENS - 1},
            {"sampling": {"temperature": 0.6}},
            {"sampling": {"temperature": 0.7}},
            {"sampling": {}},
            {"chat_template_kwargs": {"enable_thinking": True}},
            {"chat_template_kwargs": {"enable_thinking": False}},
        ],
    )
    def test_the_fingerprint_changes_with_how_it_is_asked(self, spec: WorkloadSpec, change: dict[str, Any]) -> None:
        seen = {load(spec).fingerprint, load(replace(spec, **change)).fingerprint}
        assert len(seen) == 2
        assert all(len(name) == 16 for name in seen)

    def test_the_fingerprint_changes_with_the_content(self, spec: WorkloadSpec, other: WorkloadSpec) -> None:
        assert load(spec).fingerprint != load(other).fingerprint

    def test_equal_sampling_is_the_same_workload(self, spec: WorkloadSpec) -> None:
        one, same = (
            replace(spec, sampling={"temperature": 1, "top_p": 1.0}),
            replace(spec, sampling={"top_p": 1, "temperature": 1.0}),
        )
        assert load(one).fingerprint == load(same).fingerprint

    def test_provenance_says_where_from_and_how_many(self, spec: WorkloadSpec) -> None:
        workload = load(replace(spec, limit=11))
        assert workload.provenance["count"] == len(workload.questions) == 11
        assert workload.provenance["available"] == len(load(spec).questions)
        assert workload.provenance["source"]
        json.dumps(dict(workload.provenance))

    def test_a_sample_is_a_part_of_the_whole(self, spec: WorkloadSpec) -> None:
        assert set(load(replace(spec, limit=7)).questions) < set(load(spec).questions)

    def test_requests_keep_the_limit_and_the_order(self, spec: WorkloadSpec) -> None:
        workload = load(spec)
        number = 2 * len(workload.questions) + 3
        requests = plan_requests(workload, max_tokens=MAX_TOKENS, seed=spec.seed, number=number)
        assert len({request.id for request in requests}) == number
        assert all(1 <= request.max_tokens <= MAX_TOKENS for request in requests)
        assert requests == plan_requests(workload, max_tokens=MAX_TOKENS, seed=spec.seed, number=number)
        assert [r.id for r in requests] != [
            r.id for r in plan_requests(workload, max_tokens=MAX_TOKENS, seed=spec.seed + 1, number=number)
        ]


class TestHle(WorkloadContract):
    @pytest.fixture
    def spec(self, tmp_path: Path) -> WorkloadSpec:
        folder = parquet.write(tmp_path / "hle", parquet.rows())
        return WorkloadSpec(name="hle", path=str(folder), max_tokens=MAX_TOKENS)

    @pytest.fixture
    def other(self, tmp_path: Path) -> WorkloadSpec:
        folder = parquet.write(tmp_path / "other", parquet.rows()[:-2])
        return WorkloadSpec(name="hle", path=str(folder), max_tokens=MAX_TOKENS)

    def test_the_official_prompt_is_another_workload(self, spec: WorkloadSpec) -> None:
        assert load(spec).fingerprint != load(replace(spec, official_prompt=True)).fingerprint

    def test_licence_and_revision_are_recorded(self, spec: WorkloadSpec) -> None:
        assert {"revision", "licence", "rows", "with_image"} <= load(spec).provenance.keys()


class TestJsonl(WorkloadContract):
    @pytest.fixture
    def spec(self, tmp_path: Path) -> WorkloadSpec:
        return self.written(tmp_path / "questions.jsonl", "How many legs have {} cats?")

    @pytest.fixture
    def other(self, tmp_path: Path) -> WorkloadSpec:
        return self.written(tmp_path / "other.jsonl", "How many tails have {} cats?")

    def written(self, file: Path, text: str) -> WorkloadSpec:
        lines = [
            {"id": f"q{n}", "prompt": text.format(n), "category": "ab"[n % 2], "max_tokens": 100 * (n + 1)}
            for n in range(25)
        ]
        file.write_text("\n".join(json.dumps(line) for line in lines))
        return WorkloadSpec(name="jsonl", path=str(file), max_tokens=MAX_TOKENS)


class TestSynthetic(WorkloadContract):
    @pytest.fixture
    def spec(self, tmp_path: Path) -> WorkloadSpec:
        return WorkloadSpec(name="synthetic", requests=40, max_tokens=MAX_TOKENS, mean_output_tokens=200)

    @pytest.fixture
    def other(self, tmp_path: Path) -> WorkloadSpec:
        return WorkloadSpec(name="synthetic", requests=40, max_tokens=MAX_TOKENS, mean_output_tokens=201)


def test_every_known_workload_is_under_contract() -> None:
    tested = {cls.__name__.removeprefix("Test").lower() for cls in WorkloadContract.__subclasses__()}
    assert tested == set(READERS)
