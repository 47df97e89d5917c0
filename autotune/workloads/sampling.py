"""Which of the questions are asked: a fair sample, and what fits the server's context."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from autotune.workloads.base import Question

NAMED = 5
"""Questions named in a note before the rest is only counted."""


def sample(
    questions: Sequence[Question], n: int, seed: int, *, lengths: Mapping[str, int] | None = None
) -> tuple[Question, ...]:
    """A seeded sample, stratified by category and prompt length, in the order of ``questions``.

    Categories get their share of ``n`` by largest remainder. Inside a category the questions are sorted by
    length and drawn systematically with a random start, so that each has the same chance and every part of
    the length distribution its share (Cochran, Sampling Techniques, chapter 8).

    Args:
        questions: all of them, ids unique.
        n: how many; all are returned when there are no more.
        seed: the same seed gives the same sample.
        lengths: prompt tokens by id; without, characters stand for them.
    """
    if n >= len(questions):
        return tuple(questions)
    strata: dict[str, list[Question]] = {}
    for question in questions:
        strata.setdefault(question.category or "", []).append(question)
    rng = random.Random(f"sample {seed}")
    known = lengths or {}
    chosen: set[str] = set()
    for name, share in _allocate({name: len(strata[name]) for name in sorted(strata)}, n, rng).items():
        if share == 0:
            continue
        ordered = sorted(strata[name], key=lambda q: (known.get(q.id, q.size), q.id))
        step = len(ordered) / share
        start = rng.random()
        chosen.update(ordered[int((start + i) * step)].id for i in range(share))
    return tuple(question for question in questions if question.id in chosen)


def admit(
    questions: Sequence[Question],
    lengths: Mapping[str, int] | None,
    max_model_len: int | None,
    max_tokens: int,
) -> tuple[tuple[Question, ...], tuple[Question, ...]]:
    """Split into those whose prompt and answer fit the context, and those set aside.

    A prompt fits when it is no longer than ``max_model_len`` less the answer's limit (the run's ``max_tokens``
    or the question's own, where that is smaller). What is not known (a length, ``max_model_len``) sets
    nothing aside.
    """
    if lengths is None or max_model_len is None:
        return tuple(questions), ()
    admitted: list[Question] = []
    set_aside: list[Question] = []
    for question in questions:
        room = max_model_len - question.output_limit(max_tokens)
        (admitted if lengths.get(question.id, 0) <= room else set_aside).append(question)
    return tuple(admitted), tuple(set_aside)


def aside_note(set_aside: Sequence[Question], lengths: Mapping[str, int]) -> str:
    """One sentence that counts and names what was set aside, longest first."""
    longest = sorted(set_aside, key=lambda q: -lengths.get(q.id, 0))
    names = ", ".join(f"{q.id} ({lengths[q.id]} tokens)" for q in longest[:NAMED])
    more = f" and {len(longest) - NAMED} more" if len(longest) > NAMED else ""
    return f"{len(longest)} prompts longer than max_model_len - max_tokens are not sent: {names}{more}"


def _allocate(sizes: Mapping[str, int], n: int, rng: random.Random) -> dict[str, int]:
    """Shares of ``n`` in proportion to the sizes, by largest remainder, ties drawn; ``n`` < sum of sizes."""
    total = sum(sizes.values())
    shares = {name: n * size // total for name, size in sizes.items()}
    by_remainder = sorted(sizes, key=lambda name: (-(n * sizes[name] % total), rng.random()))
    for name in by_remainder[: n - sum(shares.values())]:
        shares[name] += 1
    return shares
