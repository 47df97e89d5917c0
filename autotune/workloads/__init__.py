"""Workloads by name: ``load(spec)`` gives the questions, the same ones in every process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

from autotune import __version__
from autotune.errors import InputError
from autotune.records.codec import dumps, loads
from autotune.records.trial import WorkloadSpec
from autotune.workloads import hle, jsonl, synthetic
from autotune.workloads.base import Question, Source, Workload, fingerprint
from autotune.workloads.sampling import sample

READERS: dict[str, Callable[[WorkloadSpec], Source]] = {
    "hle": hle.read,
    "jsonl": jsonl.read,
    "synthetic": synthetic.read,
}
"""One module a workload; a new one is one file and one line here."""

__all__ = ["READERS", "Question", "Workload", "load", "parse_name"]


def load(spec: WorkloadSpec) -> Workload:
    """The questions of a run: read, sampled to ``spec.limit``, named by a fingerprint.

    The same spec is read once in a process.

    Raises:
        InputError: an unknown name, an impossible limit, or data that break a rule.
        PrerequisiteError: the data are not to be had from here.
    """
    if spec.name not in READERS:
        raise _unknown(spec.name)
    for name in ("limit", "max_tokens"):
        value = getattr(spec, name)
        if value is not None and value < 1:
            raise InputError(f"workload {spec.name}: {name} must be at least 1, got {value}")
    return _load(dumps(spec))


def parse_name(text: str) -> tuple[str, str | None]:
    """What ``--workload`` means: (name, path). A known name, ``-``, or a file of JSON lines.

    Raises:
        InputError: neither a known name nor a file.
    """
    if text in READERS:
        return text, None
    if text == "-" or text.endswith((".jsonl", ".json", ".ndjson")) or Path(text).is_file():
        return "jsonl", text
    raise _unknown(text)


@functools.cache
def _load(key: str) -> Workload:
    spec = loads(WorkloadSpec, key)
    source = READERS[spec.name](spec)
    questions, notes = source.questions, source.notes
    if spec.limit is not None and spec.limit > len(questions):
        notes = (*notes, f"limit {spec.limit:,} is more than the {len(questions):,} questions there are: all are asked")
    elif spec.limit is not None:
        questions = sample(questions, spec.limit, spec.seed)
    return Workload(
        name=spec.name,
        questions=questions,
        provenance={**source.provenance, "available": len(source.questions), "count": len(questions)},
        fingerprint=fingerprint(spec, questions),
        notes=notes,
    )


def _unknown(name: str) -> InputError:
    return InputError(
        f"unknown workload {name!r}: autotune {__version__} knows {', '.join(READERS)}",
        hint="or a file of JSON lines: --workload FILE.jsonl (- reads stdin)",
    )
