"""The questions of the demo."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from autotune.records.trial import WorkloadSpec
from autotune.workloads import load

FILE = Path(__file__).parents[3] / "studies" / "smoke-questions.jsonl"


def test_a_hundred_and_twenty_different_questions_with_answers() -> None:
    workload = load(WorkloadSpec(name="jsonl", path=str(FILE)))
    assert workload.notes == ()
    assert len({q.messages for q in workload.questions}) == 120
    assert all(q.answer for q in workload.questions)
    assert Counter(q.category for q in workload.questions) == dict.fromkeys(
        ("arithmetic", "science", "geography", "history", "language", "computing"), 20
    )


def test_prompts_are_short_and_long() -> None:
    words = [len(q.messages[0].content.split()) for q in load(WorkloadSpec(name="jsonl", path=str(FILE))).questions]
    assert min(words) < 10
    assert 100 < max(words) <= 200
    assert sum(number >= 20 for number in words) > 20
