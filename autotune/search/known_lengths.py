"""What is known of the answers' lengths before a study measures: given, found by this study, or by another one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from autotune.errors import InputError
from autotune.evaluation.loads import asked
from autotune.evaluation.probe import lengths_fingerprint
from autotune.physics.laws import SHIPPED
from autotune.physics.lengths_files import parse_lengths
from autotune.records.lengths import Lengths
from autotune.search.folder import StudyFolder
from autotune.spec import StudySpec
from autotune.workloads import load


@dataclass(frozen=True, kw_only=True)
class KnownLengths:
    """Observed lengths, or a shipped law by name; both ``None``: nothing is known."""

    lengths: Lengths | None = None
    law: str | None = None
    text: str | None = None
    """Where they come from, for the user."""


def given_lengths(lengths: str | None) -> KnownLengths:
    """What ``--lengths`` names: a shipped law, or a file.

    Raises:
        InputError: the file cannot be read, or holds no lengths.
    """
    if lengths is None:
        return KnownLengths()
    if lengths in SHIPPED:
        return KnownLengths(law=lengths)
    try:
        text = Path(lengths).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        hint = f"a file of numbers, JSON lines or CSV, or one of the shipped laws: {', '.join(SHIPPED)}"
        raise InputError(f"cannot read lengths from {lengths}: {error.strerror}", hint=hint) from None
    return KnownLengths(lengths=parse_lengths(text, source=lengths))


def study_lengths(spec: StudySpec, folder: StudyFolder) -> KnownLengths:
    """What a study knows before its next trial: what it was given, else what a probe of the same model, questions
    and sampling found, here or in a neighbouring study.

    Raises:
        InputError: a file of lengths, or of questions, that cannot be read.
        PrerequisiteError: the questions are not to be had from here.
    """
    if spec.lengths is not None:
        return given_lengths(spec.lengths)
    workload = asked(spec.engine_spec(), spec.workload)
    kept = [(place, place.read_lengths()) for place in (folder, *_neighbours(folder))]
    found = [(place, lengths) for place, lengths in kept if lengths is not None and lengths.fingerprint is not None]
    if workload.name == "synthetic" or not found:
        return KnownLengths()
    wanted = lengths_fingerprint(spec.model, load(workload))
    for place, lengths in found:
        if lengths.fingerprint == wanted:
            text = f"lengths of {len(lengths.answers)} answers are known from {place.lengths_file}"
            return KnownLengths(lengths=lengths, text=text)
    return KnownLengths()


def _neighbours(folder: StudyFolder) -> list[StudyFolder]:
    """Other studies beside this one, the newest first."""
    files = [file for file in folder.path.parent.glob("*/lengths.json") if file.parent != folder.path]
    return [StudyFolder(file.parent) for file in sorted(files, key=lambda file: file.stat().st_mtime, reverse=True)]
