"""The errors a user can meet; each class carries the exit code of the command line.

    AutotuneError            1   a bug of ours, when nothing more exact fits
    +- InputError            2   bad input: a flag, a study file, a workload line
    +- PrerequisiteError     2   something needed is missing: vllm, a token, free disk
    |  +- BusyError          5   measurable later: GPUs or study held by somebody else
    +- NothingStableError    3   nothing fits, nothing stable, the one trial failed
    +- RegressionError       4   the incumbent is slower than its own record
    +- LaunchFailed          3   a server did not get ready (data inside a search, an error alone)

Style (after uv and optuna): state the rule, the value that broke it, then a ``hint:``.
"""

from __future__ import annotations

from autotune.records.observation import Failure


class AutotuneError(Exception):
    """Base of all errors that are shown without a traceback."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class InputError(AutotuneError):
    """What the user gave breaks a rule: names the rule and the value."""

    exit_code = 2


class PrerequisiteError(AutotuneError):
    """Something that the command needs is not there."""

    exit_code = 2


class BusyError(PrerequisiteError):
    """Somebody else holds the study or the GPUs: nothing was changed, try later."""

    exit_code = 5


class NothingStableError(AutotuneError):
    """No candidate fits, or none was stable, or the one trial failed."""

    exit_code = 3


class RegressionError(AutotuneError):
    """The incumbent is slower than its own record, beyond noise."""

    exit_code = 4


class LaunchFailed(AutotuneError):
    """A server ended or stayed silent before it was ready."""

    exit_code = 3

    def __init__(self, failure: Failure, seconds: float) -> None:
        super().__init__(f"the server did not start: {failure.kind}: {failure.line}", hint=failure.hint)
        self.failure = failure
        self.seconds = seconds
