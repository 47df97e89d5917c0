"""One text of a log and what it means: the row type of ``rootcause``'s table."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from autotune.records.observation import FailureKind

Hint = str | Callable[[re.Match[str]], str]


@dataclass(frozen=True, slots=True)
class Rule:
    """One text and what it means."""

    kind: FailureKind
    pattern: re.Pattern[str]
    hint: Hint
    """What to do; named groups of the pattern may be used in braces."""
    rank: int = 0
    """0: says exactly why; 1: says less; 2: hardly anything. The lowest found counts."""
    bare: bool = False
    """Counts at the start of a line without level and exception name, too."""
    in_flight: bool = False
    """Can also end a server that is already serving."""

    def advice(self, match: re.Match[str]) -> str:
        """The hint with the numbers of the line in it."""
        if callable(self.hint):
            return self.hint(match)
        return self.hint.format(**{name: value or "?" for name, value in match.groupdict().items()})


def rule(
    kind: FailureKind,
    pattern: str,
    hint: Hint,
    *,
    rank: int = 0,
    bare: bool = False,
    in_flight: bool = False,
) -> Rule:
    """A row; see ``Rule`` for the meaning of each."""
    return Rule(kind, re.compile(pattern), hint, rank, bare, in_flight)
