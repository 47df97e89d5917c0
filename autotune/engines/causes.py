"""Lines that may say why a server ended, and which of them counts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from autotune.engines import lastwords as words
from autotune.engines.logline import LogLine
from autotune.records.observation import Failure, FailureKind

SHOWN = 300
"""Characters of the root-cause line that are kept."""


@dataclass(slots=True)
class Cause:
    """A line that may say why."""

    line: LogLine
    kind: FailureKind | None
    """``None``: an exception that no rule knows."""
    hint: str
    rank: int
    """As of its rule."""
    solid: bool
    """An exception or a final message; not a sentence logged as an error."""
    in_flight: bool
    """Can end a server that is already serving."""
    outlived: bool = False
    """vLLM went on starting after it."""

    @property
    def known(self) -> bool:
        """A rule knows it, and it ended something."""
        return self.kind is not None and self.solid

    @property
    def doubtful(self) -> bool:
        """Perhaps another program's: neither name nor head in front, and vLLM went on."""
        return self.outlived and not self.line.ours

    def of_engine(self, named: bool) -> bool:
        """An engine or worker said it; ``named``: the log names vLLM's processes, so that bare text is not theirs."""
        return not self.line.front.from_api and not is_request_error(self.line) and bool(self.line.procs or not named)

    def failure(self) -> Failure:
        """As the failure of a server."""
        text = self.line.text
        return failed(self.kind, text, self.hint) if self.kind else failed("unknown", text, words.unknown_hint(text))


def is_request_error(line: LogLine) -> bool:
    """An error about one request."""
    return (line.file or "").startswith(words.REQUEST_FILES)


def failed(kind: FailureKind, line: str, hint: str) -> Failure:
    """A failure with its line cut to size and without secrets."""
    return Failure(kind=kind, line=words.SECRET.sub(r"\1...", line.strip())[:SHOWN], hint=hint)


def of_start(causes: Iterable[Cause], named: bool) -> Cause | None:
    """Why a start failed: ours before others', known before unknown, exact before vague; of equals the first."""

    def order(cause: Cause) -> tuple[bool, bool, int]:
        foreign = cause.doubtful or (named and not cause.line.procs)
        return foreign, cause.kind is None, cause.rank

    return min(causes, key=order, default=None)


def of_death(causes: Iterable[Cause], named: bool) -> Cause | None:
    """Why a serving engine died: an exact text, else the first of what engines said (the others follow from it)."""
    own = [cause for cause in causes if cause.in_flight and cause.of_engine(named)]
    exact = [cause for cause in own if cause.kind is not None and cause.rank == 0]
    return next(iter([*exact, *own]), None)
