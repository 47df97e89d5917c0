"""Seeded lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autotune.errors import InputError
from autotune.records.trial import WorkloadSpec
from autotune.workloads import synthetic

SPEC = WorkloadSpec(name="synthetic", requests=400, mean_prompt_tokens=30, mean_output_tokens=500, sigma=0.6)


def test_lengths_follow_the_law() -> None:
    source = synthetic.read(replace(SPEC, requests=4000))
    prompts = np.array([q.size for q in source.questions])
    answers = np.array([q.max_tokens for q in source.questions])
    assert (prompts.min(), prompts.max()) == (10, 50)
    assert abs(prompts.mean() - 30) < 1
    assert abs(answers.mean() - 500) < 25
    assert abs(np.log(answers).std() - 0.6) < 0.03
    assert source.provenance["mean_output_tokens"] == round(answers.mean())
    assert source.provenance["cut_answers"] == 0


def test_answers_are_cut_at_the_limit_of_the_run() -> None:
    source = synthetic.read(replace(SPEC, max_tokens=400))
    limits = [q.max_tokens or 0 for q in source.questions]
    assert max(limits) == 400
    assert source.provenance["cut_answers"] == limits.count(400) > 50


def test_every_answer_is_forced_and_has_a_token() -> None:
    source = synthetic.read(replace(SPEC, mean_prompt_tokens=1, mean_output_tokens=1, sigma=3.0))
    assert all(q.forced and q.prompt and (q.max_tokens or 0) >= 1 for q in source.questions)


def test_sigma_zero_is_one_length() -> None:
    assert {q.max_tokens for q in synthetic.read(replace(SPEC, sigma=0.0)).questions} == {500}


def test_prompts_share_no_prefix() -> None:
    assert len({(q.prompt or ())[:3] for q in synthetic.read(SPEC).questions}) > 390


@pytest.mark.parametrize(
    ("vocab_size", "low", "high"), [(None, 1000, 9999), (151_936, 1000, 9999), (600, 60, 539), (1, 0, 0)]
)
def test_ids_are_of_the_vocabulary_and_no_special_ones(vocab_size: int | None, low: int, high: int) -> None:
    ids = {i for q in synthetic.read(replace(SPEC, vocab_size=vocab_size)).questions for i in q.prompt or ()}
    assert low <= min(ids) <= max(ids) <= high
    assert max(ids) - min(ids) > 0.95 * (high - low) - 1


def test_a_law_gives_prompts_and_answers_stratified() -> None:
    source = synthetic.read(WorkloadSpec(name="synthetic", law="hle-reasoning", max_tokens=14_336))
    answers = [q.max_tokens or 0 for q in source.questions]
    assert len(answers) == synthetic.LAW_REQUESTS
    assert abs(np.mean(answers) - 10_024) < 30
    assert max(answers) == 14_336
    assert source.provenance["cut_answers"] == pytest.approx(0.3425 * 2158, abs=2)
    assert abs(source.provenance["mean_prompt_tokens"] - 300) <= 2  # type: ignore[operator]
    assert source.provenance["source"] == "length law hle-reasoning"
    assert answers != sorted(answers)
    few = synthetic.read(WorkloadSpec(name="synthetic", law="hle-reasoning", requests=10))
    assert len(few.questions) == 10
    with pytest.raises(InputError, match="no shipped length law"):
        synthetic.read(WorkloadSpec(name="synthetic", law="mine"))


def test_the_number_when_nobody_says() -> None:
    assert len(synthetic.read(replace(SPEC, requests=None)).questions) == synthetic.REQUESTS


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"requests": 0}, "requests must be at least 1, got 0"),
        ({"mean_prompt_tokens": 0}, "mean_prompt_tokens must be at least 1"),
        ({"mean_output_tokens": -5}, "mean_output_tokens must be at least 1, got -5"),
        ({"vocab_size": 0}, "vocab_size must be at least 1"),
        ({"sigma": -0.1}, "sigma must be within 0..5, got -0.1"),
        ({"sigma": float("nan")}, "sigma must be within 0..5"),
    ],
)
def test_impossible_lengths(change: dict[str, float], says: str) -> None:
    with pytest.raises(InputError, match=says):
        synthetic.read(replace(SPEC, **change))
