from __future__ import annotations

import typing

from autotune.engines.logsummary import LOG_KINDS, log_failure
from autotune.records.observation import Failure, FailureKind


def test_kinds_of_a_log_are_those_that_a_log_can_show() -> None:
    known = set(typing.get_args(FailureKind))
    assert known >= LOG_KINDS
    assert known - LOG_KINDS == {"stalled", "start_timeout", "disk_full", "interrupted"}


def test_other_kinds_are_unknown() -> None:
    for kind in typing.get_args(FailureKind):
        told = log_failure(Failure(kind=kind, line="x", hint="y"))
        assert told.kind == (kind if kind in LOG_KINDS else "unknown")
        assert (told.line, told.hint) == ("x", "y")
