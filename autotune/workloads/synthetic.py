"""Requests of seeded lengths, without any text: prompts are token ids, answers are forced to their length."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from autotune.errors import InputError
from autotune.physics.laws import shipped_law
from autotune.records.trial import WorkloadSpec
from autotune.workloads.base import Question, Source

REQUESTS = 1000
"""How many there are when nobody says."""
LAW_REQUESTS = 2158
"""The same of a shipped law: the questions of Humanity's Last Exam that are text only."""
PROMPT_SPREAD = (0.33, 1.67)
"""Prompts are uniform between these shares of their mean: 100..500 tokens around 300, as short questions are."""
SAFE_IDS = range(1000, 10_000)
"""Plain words in every vocabulary seen: special tokens sit below 1,000 or at the end."""


def read(spec: WorkloadSpec) -> Source:
    """Draw the requests.

    Prompts are uniform around ``mean_prompt_tokens``; answers are lognormal with mean ``mean_output_tokens`` and
    shape ``sigma`` (mu = ln mean - sigma^2 / 2). With ``law`` both come from that shipped law instead, stratified:
    a thousand draws by chance would move its mean by 2 %. Answers are cut to 1..``max_tokens`` as a run would cut
    them; the mean of what is asked is in the provenance.

    Raises:
        InputError: a length or a number that cannot be, or an unknown law.
    """
    _check(spec)
    rng = random.Random(f"synthetic {spec.seed}")
    ids = _ids(spec.vocab_size)
    questions = tuple(
        Question(
            id=f"synthetic-{number:05d}",
            prompt=tuple(ids[int(rng.random() * len(ids))] for _ in range(prompt)),
            max_tokens=min(max(1, answer), spec.max_tokens),
            forced=True,
        )
        for number, (prompt, answer) in enumerate(_lengths(spec, rng))
    )
    answers = [question.max_tokens or 0 for question in questions]
    return Source(
        questions=questions,
        provenance={
            "source": "synthetic lengths" if spec.law is None else f"length law {spec.law}",
            "seed": spec.seed,
            "mean_prompt_tokens": round(sum(q.size for q in questions) / len(questions)),
            "mean_output_tokens": round(sum(answers) / len(questions)),
            "cut_answers": sum(tokens == spec.max_tokens for tokens in answers),
        },
    )


def _lengths(spec: WorkloadSpec, rng: random.Random) -> Iterator[tuple[int, int]]:
    """Prompt and answer of each request, tokens; drawn as they are asked for."""
    if spec.law is not None:
        requests = LAW_REQUESTS if spec.requests is None else spec.requests
        answers, prompts = shipped_law(spec.law, spec.max_tokens)
        yield from zip(prompts.stratified(requests, rng), answers.stratified(requests, rng), strict=True)
        return
    shortest, longest = (max(1, round(share * spec.mean_prompt_tokens)) for share in PROMPT_SPREAD)
    mu = math.log(spec.mean_output_tokens) - spec.sigma**2 / 2
    for _ in range(REQUESTS if spec.requests is None else spec.requests):
        prompt = shortest + int(rng.random() * (longest - shortest + 1))
        yield prompt, round(math.exp(min(mu + spec.sigma * rng.gauss(0.0, 1.0), 50.0)))


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
