"""Questions to requests: in a seeded order, the same for every trial of a study."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from autotune.errors import InputError
from autotune.records.load import Request
from autotune.workloads.base import Question, Workload


def plan_requests(
    workload: Workload,
    *,
    counts: Mapping[str, int] | None = None,
    max_tokens: int,
    seed: int,
    questions: Sequence[Question] | None = None,
    number: int | None = None,
    first: int = 0,
    salt: str | None = None,
) -> tuple[Request, ...]:
    """Requests in a seeded, shuffled order; equal arguments give equal requests.

    The place of a question in the order depends on the seed and its id alone, so that trials which set
    different prompts aside still send the rest in the same order. Past the last question the order starts
    again, with ``#2``, ``#3`` ... behind the ids (and behind the salt: in the real run no prompt comes twice,
    so a repeated one must not be answered from the prefix cache).

    Args:
        workload: where the questions come from.
        counts: prompt tokens by question id, as ``TokenCounter.count`` gives them.
        max_tokens: output limit of the run; a question's own, smaller one is kept.
        seed: order of the questions.
        questions: those that are asked (what ``admit`` let through); all of the workload when left out.
        number: how many requests; each question once when left out.
        first: start so many requests further along.
        salt: ``cache_salt`` of the requests.

    Raises:
        InputError: there is no question to ask.
    """
    asked = workload.questions if questions is None else questions
    if not asked:
        raise InputError(
            f"workload {workload.name}: none of its {len(workload.questions)} questions can be asked",
            hint="raise max_model_len, or lower --max-tokens, so that a prompt fits",
        )
    order = sorted(asked, key=lambda q: hashlib.sha256(f"{seed}\0{q.id}".encode()).digest())
    taken = {question.id for question in order}
    requests = []
    for index in range(first, first + (len(order) if number is None else number)):
        lap, place = divmod(index, len(order))
        question = order[place]
        tokens = None if question.prompt is None else len(question.prompt)
        requests.append(
            Request(
                id=question.id if lap == 0 else _repeat(question.id, lap + 1, taken),
                max_tokens=question.output_limit(max_tokens),
                prompt=question.prompt,
                messages=question.messages or None,
                prompt_tokens=tokens if counts is None else counts.get(question.id, tokens),
                forced=question.forced,
                salt=salt if salt is None or lap == 0 else f"{salt}#{lap + 1}",
            )
        )
    return tuple(requests)


def _repeat(question_id: str, lap: int, taken: set[str]) -> str:
    """``id#2``; a question that is really called so moves the mark (``id##2``)."""
    mark = "#"
    while f"{question_id}{mark}{lap}" in taken:
        mark += "#"
    return f"{question_id}{mark}{lap}"
