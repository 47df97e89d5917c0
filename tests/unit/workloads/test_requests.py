"""Requests in a seeded order, the same for every trial."""

from __future__ import annotations

import pytest

from autotune.errors import InputError
from autotune.records.load import Message
from autotune.workloads.base import Question, Workload
from autotune.workloads.requests import plan_requests


def workload(*ids: str, max_tokens: int | None = None) -> Workload:
    questions = tuple(
        Question(id=name, messages=(Message(role="user", content=f"{name}?"),), max_tokens=max_tokens) for name in ids
    )
    return Workload(name="jsonl", questions=questions, provenance={"count": len(ids)}, fingerprint="0" * 16)


TWENTY = workload(*(f"q{n}" for n in range(20)))


def test_each_question_once_in_a_seeded_order() -> None:
    requests = plan_requests(TWENTY, max_tokens=100, seed=1)
    ids = [request.id for request in requests]
    assert sorted(ids) == sorted(q.id for q in TWENTY.questions)
    assert ids != [q.id for q in TWENTY.questions]
    assert requests == plan_requests(TWENTY, max_tokens=100, seed=1)
    assert ids != [request.id for request in plan_requests(TWENTY, max_tokens=100, seed=2)]
    assert requests[0].messages == (Message(role="user", content=f"{ids[0]}?"),)
    assert not any(request.forced for request in requests)


def test_setting_some_aside_keeps_the_order_of_the_rest() -> None:
    everything = [r.id for r in plan_requests(TWENTY, max_tokens=100, seed=1)]
    kept = TWENTY.questions[3:15]
    some = [r.id for r in plan_requests(TWENTY, max_tokens=100, seed=1, questions=kept)]
    assert some == [name for name in everything if name in {q.id for q in kept}]


def test_more_requests_than_questions_start_again() -> None:
    requests = plan_requests(workload("a", "b"), max_tokens=9, seed=0, number=5, salt="s")
    first, second = requests[0].id, requests[1].id
    assert [r.id for r in requests] == [first, second, f"{first}#2", f"{second}#2", f"{first}#3"]
    assert [r.salt for r in requests] == ["s", "s", "s#2", "s#2", "s#3"]
    assert [r.messages for r in requests[:2]] == [r.messages for r in requests[2:4]]
    assert plan_requests(workload("a", "b"), max_tokens=9, seed=0, number=2, first=3, salt="s") == requests[3:]


def test_ids_that_look_like_repeats_stay_apart() -> None:
    requests = plan_requests(workload("a", "a#2"), max_tokens=9, seed=0, number=6)
    assert len({r.id for r in requests}) == 6


@pytest.mark.parametrize(("own", "run", "expected"), [(None, 100, 100), (50, 100, 50), (500, 100, 100)])
def test_the_smaller_limit_counts(own: int | None, run: int, expected: int) -> None:
    (request,) = plan_requests(workload("a", max_tokens=own), max_tokens=run, seed=0)
    assert request.max_tokens == expected


def test_counts_are_carried() -> None:
    by_id = {r.id: r.prompt_tokens for r in plan_requests(workload("a", "b"), counts={"a": 5}, max_tokens=9, seed=0)}
    assert by_id == {"a": 5, "b": None}


def test_token_ids_are_sent_as_they_are() -> None:
    question = Question(id="s", prompt=(5, 6, 7), max_tokens=4, forced=True)
    made = Workload(name="synthetic", questions=(question,), provenance={}, fingerprint="")
    (request,) = plan_requests(made, max_tokens=9, seed=0)
    assert (request.prompt, request.messages, request.max_tokens, request.forced) == ((5, 6, 7), None, 4, True)
    assert request.prompt_tokens == 3


def test_nothing_to_ask() -> None:
    with pytest.raises(InputError, match="none of its 20 questions can be asked"):
        plan_requests(TWENTY, max_tokens=9, seed=0, questions=())
