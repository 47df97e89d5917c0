"""What ended a server: its log, line by line -> a ``Failure`` with the root cause, or ``None``.

vLLM's last words ("Engine core initialization failed. See root cause above.") never say why, and a log holds much
that looks like a failure and is none: requests refused, other programs' tracebacks, what a stop prints. So the
lines are followed as the life of a server (starting, ready, dead, stopped); the texts of ``rootcause`` are
collected on the way and count only where they can have ended it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from autotune.engines import lastwords as words
from autotune.engines.causes import Cause, failed, is_request_error, of_death, of_start
from autotune.engines.logline import Front, LogLine, parse
from autotune.engines.rootcause import match_rule
from autotune.records.observation import Failure, FailureKind

RECENT = 16
"""Errors of a serving engine that are remembered until it dies, to find the first of the last trouble."""
LIVELY = 3
"""So many stats lines with throughput, at different times, show that the server lives on after an error."""
CAUSES = 256
"""Causes kept of one start; a log that repeats its traceback for hours must not fill the memory."""


class Diagnosis:
    """Follows one log: ``feed`` its noteworthy lines in order, ask ``failure`` at any time."""

    def __init__(self) -> None:
        self._front: Front | None = None
        self._api_pids: set[str] = set()
        self._named = False
        """The log names vLLM's processes in front of their lines."""
        self._uvicorn_pid: str | None = None
        self._own_uvicorn_pid: str | None = None
        self.last_text = ""
        """What the log ends with, where nothing says more."""
        self._begin()

    def _begin(self, *, stopped: str | None = None) -> None:
        """A server starts; ``stopped``: one ended on request by this line, and another may follow."""
        self.ready = False
        self._stopped = stopped
        self._causes: list[Cause] = []
        self._recent: deque[Cause] = deque(maxlen=RECENT)
        self._death: LogLine | None = None
        self._died_serving = False
        self._silent_death = False
        self._lively: set[str | None] = set()

    @property
    def watching(self) -> bool:
        """A start is in doubt that an INFO line of vLLM or an answered request would settle: feed those, too."""
        return self._death is None and not self.ready and bool(self._causes)

    def feed(self, line: LogLine) -> None:
        """Take the next line."""
        if stats := words.STATS.match(line.text):
            self.feed_stats(line, float(stats["rate"]))
            return
        self.last_text = line.text.strip() or self.last_text
        self._see_front(line)
        if line.front.interrupted or (words.ASKED.match(line.text) and self._concerns_server(line)):
            self._stop(line)
        if line.level in words.QUIET_LEVELS:
            self._quiet(line)
        else:
            self._loud(line)

    def feed_stats(self, line: LogLine, rate: float) -> None:
        """Take a stats line, whose output throughput is known."""
        self.last_text = line.text
        self._see_front(line)
        self._serving(line, rate)

    def _see_front(self, line: LogLine) -> None:
        front = line.front
        if front is not self._front:
            self._front = front
            self._named = self._named or front.from_api or front.from_engine
            if front.from_api:
                self._api_pids.add(front.procs[-1].rpartition("pid=")[2])

    def _quiet(self, line: LogLine) -> None:
        text = line.text
        if match := words.UVICORN.match(text):
            self._uvicorn_pid = match["pid"]
            self._own_uvicorn_pid = self._own_uvicorn_pid or match["pid"]
        elif line.ours and words.BANNER.match(text):
            self._own_uvicorn_pid = None
            self._begin()
        elif line.ours and words.STARTING_HTTP.match(text):
            self._own_uvicorn_pid = self._uvicorn_pid = None
            self._set_ready()
        elif words.READY.match(text) and self._own_http(line):
            self._set_ready()
        elif words.ANSWERED.match(text) and self._own_http(line):
            self._serving(line, 0.0)
        elif words.STOPPED.match(text) and self._own_http(line):
            if self._death is None and not self._refused():
                self._begin(stopped=self._stopped or text)
        elif words.SILENT.search(text):
            self._die(line, serving=self.ready, silent=True)
        elif line.ours:
            if self._stopped is not None and words.FRESH.match(text):
                self._begin()
            for cause in self._causes:
                cause.outlived = True

    def _own_http(self, line: LogLine) -> bool:
        """uvicorn's words may come from another program in the same log; its process id tells."""
        if line.procs:
            return line.front.from_api or not self._api_pids
        if self._uvicorn_pid is None:
            return True
        own = self._api_pids or {self._own_uvicorn_pid or self._uvicorn_pid}
        return self._uvicorn_pid in own

    def _concerns_server(self, line: LogLine) -> bool:
        """Ctrl-C without a name, while a server serves whose lines have names, hit some client."""
        return line.ours or not (self.ready and self._named and line.text.startswith("KeyboardInterrupt"))

    def _set_ready(self) -> None:
        self._begin()
        self.ready = True

    def _serving(self, line: LogLine, rate: float) -> None:
        """A stats line or an answer: proof of life, except for the few that still come after a death or a stop."""
        in_doubt = self._death is not None or self._stopped is not None or bool(self._recent)
        if not in_doubt:
            if not self.ready:
                self._set_ready()
        elif rate > 0:
            self._lively.add(line.stamp)
            if len(self._lively) >= LIVELY:
                self._set_ready()

    def _stop(self, line: LogLine) -> None:
        """Somebody asked for a stop; what failed before stays a failure."""
        unexplained = self._silent_death or not (self._died_serving or self._causes)
        if (self._death is None or unexplained) and not self._refused():
            self._begin(stopped=line.text or "^C")

    def _refused(self) -> bool:
        """The start has failed for a known reason, though the process may linger."""
        return not self.ready and any(cause.known and not cause.outlived for cause in self._causes)

    def _loud(self, line: LogLine) -> None:
        """An error, or text without a level."""
        if line.level is not None and words.CODE.match(line.text):
            return
        text = line.text.strip()
        shaped = words.EXCEPTION.match(text) is not None
        bare = line.level is None and not shaped
        if words.USAGE_ERROR.match(text):
            self._begin()
        if is_request_error(line):
            self._serving(line, 0.0)
        found = None if self._full(line) else match_rule(text, bare=bare)
        if found is not None:
            rule, match = found
            self._add(Cause(line, rule.kind, rule.advice(match), rule.rank, shaped or bare, rule.in_flight))
        elif shaped and not self._full(line) and not words.WRAPPER.search(text):
            self._add(Cause(line, None, "", rank=0, solid=True, in_flight=True))
        if words.SILENT.search(text) and not bare:
            self._die(line, serving=self.ready, silent=True)
        elif words.DEAD.match(text) if bare else words.DEAD.search(text):
            self._die(line, serving=self.ready)
        elif not bare and words.DEAD_STARTING.search(text) and (line.ours or self._own_http(line)):
            self._die(line, serving=False)
        elif not bare and words.DEAD_SERVING.search(text):
            self._die(line, serving=True)

    def _full(self, line: LogLine) -> bool:
        """Nothing that this line says would count: enough is known, or it is about a request."""
        return len(self._causes) >= CAUSES or (self.ready and self._death is None and is_request_error(line))

    def _add(self, cause: Cause) -> None:
        self._lively.clear()
        if self._stopped is not None and (cause.kind in words.STOP_NOISE or not cause.solid):
            return
        if self.ready and self._death is None:
            self._recent.append(cause)
        elif len(self._causes) < CAUSES:
            self._causes.append(cause)

    def _die(self, line: LogLine, *, serving: bool, silent: bool = False) -> None:
        if self._stopped is not None or (self._death is not None and not self._silent_death):
            return
        if silent and (self._death is not None or not (self.ready or self._api_pids)):
            return  # the end of an offline engine's program
        if self._death is None:
            self._causes += self._recent
            self._death = line
        self._silent_death, self._died_serving = silent, serving
        self._lively.clear()

    def failure(self, *, exit_code: int | None = None, ready: bool | None = None) -> Failure | None:
        """What ended the last server of the log.

        Args:
            exit_code: exit status of a process that ended unasked (negative: by a signal); any is a failure.
            ready: whether it had become ready, where the caller knows better than the log.
        """
        if self._death is not None:
            return self._dead(self._death.text, self._died_serving if ready is None else ready)
        if self.ready if ready is None else ready:
            cause = of_death((c for c in (*self._recent, *self._causes) if c.kind is not None), self._named)
            if cause is not None:
                return cause.failure()
            return None if exit_code is None else self._by_exit_code(exit_code, "engine_died")
        ended = exit_code is not None
        cause = of_start((c for c in self._causes if c.known and not c.doubtful), self._named)
        if cause is None and (ended or self._stopped is None):
            cause = of_start((c for c in self._causes if c.solid and not c.outlived), self._named)
        if cause is None and ended:
            cause = of_start(self._causes, self._named)
        if cause is not None:
            return cause.failure()
        return None if exit_code is None else self._by_exit_code(exit_code, "unknown")

    def _dead(self, last_words: str, serving: bool) -> Failure:
        if not serving:
            cause = of_start(self._causes, self._named)
            return cause.failure() if cause else failed("unknown", last_words, words.unknown_hint(last_words))
        cause = of_death(self._causes, self._named)
        if cause is not None and cause.kind is not None:
            return cause.failure()
        text = last_words if cause is None else cause.line.text
        return failed("engine_died", text, words.death_hint(text))

    def _by_exit_code(self, exit_code: int, kind: FailureKind) -> Failure:
        if self._stopped is not None:
            return failed("interrupted", self._stopped, "somebody else stopped the server: start it again")
        return failed(kind, self.last_text or f"exit code {exit_code}, and no log", words.exit_hint(exit_code))


def diagnose(lines: Iterable[str], *, exit_code: int | None = None, ready: bool | None = None) -> Failure | None:
    """What ended the server that wrote these lines (the last one, if they hold several).

    Args:
        lines: the log; line ends, ANSI codes and prefixes do not matter.
        exit_code: exit status of a process that ended unasked (negative: by a signal); then there is always a
            failure, code 0 included.
        ready: whether the server had become ready, where the caller knows.

    Returns:
        The failure, its line without prefix and at most 300 characters long, or ``None``: it serves, was stopped
        on request, or nothing is known to have gone wrong.
    """
    diagnosis = Diagnosis()
    for text in lines:
        for part in text.replace("\0", "").splitlines():
            for line in parse(part):
                diagnosis.feed(line)
    return diagnosis.failure(exit_code=exit_code, ready=ready)
