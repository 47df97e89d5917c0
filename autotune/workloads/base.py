"""What every workload is: questions, where they come from, and a fingerprint of what is asked and how."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from autotune.records.codec import encode
from autotune.records.load import Message
from autotune.records.trial import WorkloadSpec


@dataclass(frozen=True, kw_only=True)
class Question:
    """One question. Exactly one of ``messages`` and ``prompt`` is given."""

    id: str
    """Unique within the workload; answers are kept under it."""
    messages: tuple[Message, ...] = ()
    """Chat messages, content always plain text."""
    prompt: tuple[int, ...] | None = None
    """Token ids (``synthetic``)."""
    category: str | None = None
    max_tokens: int | None = None
    """Output limit of this question, tokens; the limit of the run applies as well."""
    answer: str | None = None
    """Reference answer."""
    answer_type: str | None = None
    """``exact_match`` or ``multiple_choice`` where the data set says so."""
    forced: bool = False
    """The answer has exactly ``max_tokens`` tokens (``ignore_eos``)."""

    def __post_init__(self) -> None:
        if (self.prompt is None) == (not self.messages):
            raise ValueError(f"question {self.id}: exactly one of messages and prompt is needed")

    @property
    def size(self) -> int:
        """Length of the prompt before anything is tokenised: characters, or tokens where it is token ids."""
        return sum(len(m.content) for m in self.messages) if self.prompt is None else len(self.prompt)

    def output_limit(self, max_tokens: int) -> int:
        """Tokens the answer may have in a run with this ``max_tokens``."""
        return max_tokens if self.max_tokens is None else min(self.max_tokens, max_tokens)


@dataclass(frozen=True, kw_only=True)
class Source:
    """What a reader found, before a sample is taken."""

    questions: tuple[Question, ...]
    provenance: Mapping[str, str | int]
    """Where it comes from: revision, counts, licence, access."""
    notes: tuple[str, ...] = ()
    """What the user should be told."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Questions that a run asks, as ``load`` gives them."""

    name: str
    questions: tuple[Question, ...]
    provenance: Mapping[str, str | int]
    """``count`` (questions asked), ``source``, and what the reader knows: ``revision``, ``licence``, ..."""
    fingerprint: str
    """Sixteen hexadecimal digits: changes with the content and with how it is asked."""
    notes: tuple[str, ...] = field(default=())
    """What the user should be told: a clipped limit, rows that were left out."""


def fingerprint(spec: WorkloadSpec, questions: tuple[Question, ...]) -> str:
    """Name what is asked and how: questions, output limit, order, sampling, chat template arguments.

    The place of the data is no part of it: the same questions from another folder are the same workload.
    """
    sampling = spec.sampling
    asked = {
        "name": spec.name,
        "seed": spec.seed,
        "max_tokens": spec.max_tokens,
        "sampling": None if sampling is None else {name: float(value) for name, value in sampling.items()},
        "chat_template_kwargs": dict(spec.chat_template_kwargs),
        "questions": encode(questions),
    }
    text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
