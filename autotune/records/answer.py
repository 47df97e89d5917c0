"""One answer of the model, kept: text lives in ``answers/`` of a study and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What came back for one question; one line of a file in ``answers/``."""

    SCHEMA: ClassVar[str] = "autotune/answer/1"

    id: str
    """Of the question."""
    text: str
    finish_reason: str | None
    """``stop``: it ended by itself; ``length``: cut at ``max_tokens``."""
    prompt_tokens: int | None
    output_tokens: int | None
    max_tokens: int
    """Output limit under which it was written."""
    fingerprint: str
    """Of model, questions, limit and sampling: an answer is used again only where it is the same."""
