"""The search itself: baselines, then what the sampler proposes, until trials, time or the space run out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autotune.errors import InputError, NothingStableError, PrerequisiteError
from autotune.evaluation.predict import forecast_of
from autotune.planning import random_weights
from autotune.planning.space import Space
from autotune.records.event import Emit, Event
from autotune.records.observation import FailureKind
from autotune.records.settings import Settings
from autotune.records.trial import ConcurrencyPlan, Execute, TrialResult, TrialTask
from autotune.records.winner import Winner
from autotune.search.choose import best_trial, objective_s, winner_record
from autotune.search.folder import StudyFolder
from autotune.search.known_lengths import KnownLengths, study_lengths
from autotune.search.study import Asked, Study
from autotune.spec import Baseline, StudySpec

HOPELESS: frozenset[FailureKind] = frozenset({"gated_model", "model_not_found", "disk_full"})
"""Failures that every further trial would repeat: the search stops and says so."""

CONSTRAINTS = (
    "failed_requests", "engine", "stall", "preemptions", "kv", "drift", "truncation", "ttft", "tpot", "launch",
)  # fmt: skip
"""The same set on every trial; a trial that did not start violates ``launch``."""


class Search:
    """One search on one study folder; the caller holds its lock.

    Args:
        spec: the study, defaults filled in.
        folder: where it lives; finished trials found there are kept and counted.
        space: what may be launched.
        execute: runs a task.
        emit: where events go.
    """

    def __init__(self, spec: StudySpec, folder: StudyFolder, space: Space, execute: Execute, emit: Emit) -> None:
        random_weights.check_study(spec)
        self._spec = spec
        self._folder = folder
        self._execute = execute
        self._emit = emit
        self._study = Study(folder.journal, folder.name, space, seed=spec.seed)
        self._results = folder.trials()
        self._known = study_lengths(spec, folder)
        if self._known.text is not None:
            emit(Event(kind="note", data={"text": self._known.text}))
        self._mend()

    def run(self) -> Winner:
        """Search until a limit is reached; the winner so far is on disk after every better trial.

        Raises:
            NothingStableError: no trial was stable.
            PrerequisiteError: a failure that every trial would repeat.
        """
        self._queue_baselines()
        self._emit(Event(kind="study_started", data={"trials": self._spec.trials, "kept": len(self._results)}))
        why = "all trials were used"
        while len(self._results) < self._spec.trials:
            spent = sum(result.total_s for result in self._results)
            if self._spec.budget_s is not None and spent >= self._spec.budget_s:
                why = f"the budget of {self._spec.budget_s:.0f} s was used"
                break
            asked = self._study.ask()
            if asked is None:
                why = "every setting of the space was launched"
                break
            self._one(asked)
        return self._end(why)

    def _one(self, asked: Asked) -> None:
        self._emit(
            Event(
                kind="trial_started",
                trial=asked.number,
                data={"kind": asked.kind, "label": asked.label, "settings": str(asked.settings)},
            )
        )
        try:
            result = self._execute(self._task(asked))
        except BaseException:
            self._study.forget(asked.number)
            raise
        result = replace(result, objective=objective_s(result))
        if result.lengths is not None:
            self._known = KnownLengths(lengths=result.lengths)
            self._folder.write_lengths(result.lengths)
        self._folder.append_trial(result)
        self._results.append(result)
        self._tell(result)
        self._emit(Event(kind="trial_ended", trial=result.number, data=_summary(result)))
        best = best_trial(self._results)
        if best is not None and best.number == result.number:
            self._write("unconfirmed: the search goes on")
        if result.failure is not None and result.failure.kind in HOPELESS:
            raise PrerequisiteError(
                f"trial {result.number} failed with {result.failure.kind}, as every other would: {result.failure.line}",
                hint=result.failure.hint,
            )

    def _task(self, asked: Asked) -> TrialTask:
        values = tuple(int(value) for value in asked.extra.get("concurrency", ()))
        plan = ConcurrencyPlan(values=values) if values else self._spec.concurrency
        attempt = self._folder.attempt(asked.number)
        return TrialTask(
            number=asked.number,
            kind=asked.kind,
            settings=asked.settings,
            engine=self._spec.engine_spec(),
            workload=self._spec.workload,
            measure=self._spec.measure,
            concurrency=plan,
            folder=str(attempt),
            label=asked.label,
            trial_limit_s=self._spec.trial_limit_s,
            lengths=self._known.lengths,
            law=self._known.law,
            probe=self._spec.probe if self._spec.probe.questions else None,
            answers=str(self._folder.answers),
        )

    def _tell(self, result: TrialResult) -> None:
        self._study.tell(result, constraints(result))
        if result.state == "FAIL":
            self._study.forget(result.number)

    def _mend(self) -> None:
        """Tell what a killed run had finished, forget what it had not; its settings are queued again once."""
        told = {result.number: result for result in self._results}
        for number in self._study.running():
            if number in told:
                self._study.tell(told[number], constraints(told[number]))
            elif self._study.forget(number):
                text = f"trial {number} was cut off by the end of an earlier run: its settings are queued again"
                self._emit(Event(kind="note", trial=number, data={"text": text}))

    def _queue_baselines(self) -> None:
        known = self._study.labels()
        for baseline in self._spec.baselines or default_baselines(self._spec):
            if baseline.label not in known:
                extra = {"concurrency": list(baseline.concurrency)}
                self._study.enqueue(Settings(baseline.flags), "baseline", baseline.label, extra)

    def _write(self, why: str, *, final: bool = False) -> Winner | None:
        """Replace ``winner.json``; the last one has the forecast, which costs a second or two."""
        best = best_trial(self._results)
        record = winner_record(
            self._spec,
            self._folder.name,
            self._results,
            verdict="unconfirmed",
            why=why,
            settles="repeat the best settings and the best baseline on fresh servers",
            forecast=forecast_of(self._with_lengths(), best, self._results) if final and best is not None else None,
        )
        if record is not None:
            self._folder.write_winner(record)
            self._emit(Event(kind="winner_changed", trial=record.trial, data={"settings": str(record.settings)}))
        return record

    def _with_lengths(self) -> StudySpec:
        """The study as if the lengths that a probe found had been given."""
        if self._spec.lengths is not None or self._known.lengths is None:
            return self._spec
        if not self._folder.lengths_file.exists():
            self._folder.write_lengths(self._known.lengths)  # another study's
        return self._spec.model_copy(update={"lengths": str(self._folder.lengths_file)})

    def _end(self, why: str) -> Winner:
        record = self._write(why, final=True)
        self._emit(Event(kind="study_ended", data={"why": why}))
        if record is None:
            kinds = sorted({result.failure.kind for result in self._results if result.failure is not None})
            raise NothingStableError(
                f"none of {len(self._results)} trials was stable ({', '.join(kinds) or 'see the report'})",
                hint=f"`autotune report {self._folder.name}` names the reason of each",
            )
        return record


def constraints(result: TrialResult) -> Mapping[str, float]:
    """Dimensionless violations of a trial, at most 0 where fine; the same names on every trial."""
    values = dict.fromkeys(CONSTRAINTS, 0.0)
    load = result.measurement or (result.loads[-1] if result.loads else None)
    if load is None:
        values["launch"] = 1.0
    else:
        values |= {name: load.violations.get(name, 0.0) for name in CONSTRAINTS if name != "launch"}
    return values


def default_baselines(spec: StudySpec) -> tuple[Baseline, ...]:
    """What the user would run without us: vLLM's defaults, at 32 and at 100 in flight."""
    return (Baseline(label="vLLM defaults"),)


def check_resume(spec: StudySpec, stored: StudySpec | None) -> None:
    """A study keeps what its numbers mean.

    Raises:
        InputError: the stored study measured something else.
    """
    if stored is not None and stored.fingerprint != spec.fingerprint:
        ours, theirs = spec.to_data(), stored.to_data()
        changed = sorted(key for key in ours if ours[key] != theirs[key])
        raise InputError(
            f"study {spec.study_name} exists and was made with other {', '.join(changed)}",
            hint="give this one another name with --study NAME",
        )


def _summary(result: TrialResult) -> dict[str, object]:
    best = result.measurement
    return {
        "state": result.state,
        "label": result.label,
        "settings": str(result.settings),
        "concurrency": None if best is None else best.concurrency,
        "output_tokens_per_s": None if best is None else best.output_tokens_per_s,
        "failure": None if result.failure is None else result.failure.kind,
        "startup_s": result.startup_s,
        "total_s": result.total_s,
    }
