"""Requests of seeded lengths, without any text: prompts are token ids, answers are forced to their length."""

from __future__ import annotations

import math
import random

from autotune.errors import InputError
from autotune.records.trial import WorkloadSpec
from autotune.workloads.base import Question, Source

REQUESTS = 1000
"""How many there are when nobody says."""
PROMPT_SPREAD = (0.33, 1.67)
"""Prompts are uniform between these shares of their mean: 100..500 tokens around 300, as short questions are."""
SAFE_IDS = range(1000, 10_000)
"""Plain words in every vocabulary seen: special tokens sit below 1,000 or at the end."""


def read(spec: WorkloadSpec) -> Source:
    """Draw the requests.

    Answers are lognormal with mean ``mean_output_tokens`` and shape ``sigma`` (mu = ln mean - sigma^2 / 2),
    cut to 1..``max_tokens`` as a run would cut them: the mean of what is asked is in the provenance.

    Raises:
        InputError: a length or a number that cannot be.
    """
    _check(spec)
    requests = REQUESTS if spec.requests is None else spec.requests
    rng = random.Random(f"synthetic {spec.seed}")
    ids = _ids(spec.vocab_size)
    shortest, longest = (max(1, round(share * spec.mean_prompt_tokens)) for share in PROMPT_SPREAD)
    mu = math.log(spec.mean_output_tokens) - spec.sigma**2 / 2
    questions = []
    for number in range(requests):
        tokens = shortest + int(rng.random() * (longest - shortest + 1))
        prompt = tuple(ids[int(rng.random() * len(ids))] for _ in range(tokens))
        drawn = math.exp(min(mu + spec.sigma * rng.gauss(0.0, 1.0), 50.0))
        questions.append(
            Question(
                id=f"synthetic-{number:05d}",
                prompt=prompt,
                max_tokens=min(max(1, round(drawn)), spec.max_tokens),
                forced=True,
            )
        )
    answers = [question.max_tokens or 0 for question in questions]
    return Source(
        questions=tuple(questions),
        provenance={
            "source": "synthetic lengths",
            "seed": spec.seed,
            "mean_prompt_tokens": round(sum(q.size for q in questions) / requests),
            "mean_output_tokens": round(sum(answers) / requests),
            "cut_answers": sum(tokens == spec.max_tokens for tokens in answers),
        },
    )


def _check(spec: WorkloadSpec) -> None:
    for name in ("mean_prompt_tokens", "mean_output_tokens", "requests", "vocab_size"):
        value = getattr(spec, name)
        if value is not None and value < 1:
            raise InputError(f"workload synthetic: {name} must be at least 1, got {value}")
    if not 0.0 <= spec.sigma <= 5.0:
        raise InputError(
            f"workload synthetic: sigma must be within 0..5, got {spec.sigma}",
            hint="0.8 is what long reasoning answers show; 0 makes all answers equally long",
        )


def _ids(vocab_size: int | None) -> range:
    if vocab_size is None or vocab_size >= SAFE_IDS.stop:
        return SAFE_IDS
    return range(vocab_size // 10, max(vocab_size - vocab_size // 10, vocab_size // 10 + 1))
