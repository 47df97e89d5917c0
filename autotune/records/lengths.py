"""How long prompts and answers are: numbers only, never text. ``lengths.json`` of a study."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class AnswerLength:
    """One answer's length."""

    tokens: int
    ended: bool
    """False: cut at a limit or still running, so the true length is at least ``tokens`` (censored)."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Observed lengths of one workload with one model and one sampling."""

    SCHEMA: ClassVar[str] = "autotune/lengths/1"

    prompt_tokens: tuple[int, ...]
    """Prompt lengths, chat template applied."""
    answers: tuple[AnswerLength, ...]
    max_tokens: int
    """Output limit under which the answers were written."""
    source: str
    """Where the numbers come from: ``probe``, a file name, or the name of a shipped law."""
    fingerprint: str | None = None
    """Model, workload and sampling they belong to."""
