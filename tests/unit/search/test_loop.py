from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autotune.errors import InputError, NothingStableError, PrerequisiteError
from autotune.planning.space import Space, space_of
from autotune.records.event import Event
from autotune.records.observation import Failure
from autotune.records.settings import Settings
from autotune.records.trial import TrialResult, TrialTask
from autotune.search.folder import StudyFolder
from autotune.search.loop import Search, check_resume
from autotune.spec import StudySpec
from tests.unit.search.results import load, result

SPEC = StudySpec(
    model="m",
    name="s",
    trials=6,
    space={"max_num_seqs": (8, 16, 32, 64)},
    baselines=[{"label": "defaults", "concurrency": (8, 32)}],
)


def answer(rate: Callable[[Settings], float | None]) -> Callable[[TrialTask], TrialResult]:
    def execute(task: TrialTask) -> TrialResult:
        value = rate(task.settings)
        loads = tuple(load(c, value) for c in task.concurrency.values or (8,)) if value else ()
        return result(
            task.number,
            value,
            settings=task.settings,
            kind=task.kind,
            label=task.label,
            loads=loads,
            best=len(loads) - 1 if loads else None,
        )

    return execute


def make(
    tmp_path: Path, execute: Callable[[TrialTask], TrialResult], spec: StudySpec = SPEC
) -> tuple[Search, StudyFolder, list[Event]]:
    folder = StudyFolder(tmp_path / "s")
    folder.create()
    events: list[Event] = []
    return Search(spec, folder, space_of(spec, 0), execute, events.append), folder, events


def rates(settings: Settings) -> float | None:
    return 100.0 + settings.integer("max_num_seqs", 8)


def test_it_finds_the_best_and_compares_with_every_baseline_load(tmp_path: Path) -> None:
    search, folder, events = make(tmp_path, answer(rates))
    winner = search.run()
    assert winner.settings == Settings(max_num_seqs=64)
    assert folder.read_winner() == winner
    assert [gain.baseline for gain in winner.gains] == ["defaults at 8 in flight", "defaults at 32 in flight"]
    assert winner.gains[0].ratio == pytest.approx(164 / 108)
    assert winner.gains[0].low is not None
    assert winner.gains[0].low < 164 / 108
    assert winner.why == "every setting of the space was launched"
    trials = folder.trials()
    assert trials[0].kind == "baseline"
    assert len(trials) == 5
    assert [e.kind for e in events if e.kind.startswith("study")] == ["study_started", "study_ended"]


def test_failed_settings_are_data_and_never_win(tmp_path: Path) -> None:
    search, folder, _ = make(tmp_path, answer(lambda s: None if s.integer("max_num_seqs", 8) > 16 else rates(s)))
    winner = search.run()
    assert winner.settings == Settings(max_num_seqs=16)
    assert [t.state for t in folder.trials()].count("PRUNED") == 2


def test_nothing_stable_is_exit_3_and_keeps_the_trials(tmp_path: Path) -> None:
    search, folder, _ = make(tmp_path, answer(lambda s: None))
    with pytest.raises(NothingStableError, match="kv_too_small") as caught:
        search.run()
    assert caught.value.exit_code == 3
    assert len(folder.trials()) == 5
    assert not folder.winner_file.exists()


def test_a_rerun_goes_on_where_it_stopped(tmp_path: Path) -> None:
    calls: list[Settings] = []

    def counted(task: TrialTask) -> TrialResult:
        calls.append(task.settings)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return answer(rates)(task)

    search, folder, _ = make(tmp_path, counted)
    with pytest.raises(KeyboardInterrupt):
        search.run()
    assert len(folder.trials()) == 2
    assert folder.read_winner().verdict == "unconfirmed"
    again, _, _ = make(tmp_path, counted)
    winner = again.run()
    assert winner.settings == Settings(max_num_seqs=64)
    assert calls[2] == calls[3]  # the interrupted settings run again, once
    assert len(set(calls)) == 5
    assert len(calls) == 6


def test_a_result_written_but_not_told_is_told_on_the_next_run(tmp_path: Path) -> None:
    search, folder, _ = make(tmp_path, answer(rates))

    class Killed(BaseException):
        pass

    def killed(result: TrialResult, constraints: object) -> None:
        raise Killed

    search._study.tell = killed  # type: ignore[method-assign]
    with pytest.raises(Killed):
        search.run()
    assert len(folder.trials()) == 1
    again, _, _ = make(tmp_path, answer(rates))
    again.run()
    numbers = [t.number for t in folder.trials()]
    assert numbers == sorted(set(numbers))
    assert [t.label for t in folder.trials()].count("defaults") == 1


def test_an_environment_failure_is_retried_once(tmp_path: Path) -> None:
    seen: list[Settings] = []

    def busy(task: TrialTask) -> TrialResult:
        seen.append(task.settings)
        if task.settings.get("max_num_seqs") == 32:
            return result(
                task.number, None, settings=task.settings, state="FAIL", failure=Failure(kind="gpu_busy", line="x")
            )
        return answer(rates)(task)

    search, _, _ = make(tmp_path, busy, SPEC.model_copy(update={"trials": 6}))
    search.run()
    assert seen.count(Settings(max_num_seqs=32)) == 2


def test_a_failure_that_every_trial_repeats_ends_the_search(tmp_path: Path) -> None:
    def gated(task: TrialTask) -> TrialResult:
        return result(task.number, None, failure=Failure(kind="gated_model", line="401", hint="log in"))

    search, folder, _ = make(tmp_path, gated)
    with pytest.raises(PrerequisiteError, match="gated_model") as caught:
        search.run()
    assert caught.value.hint == "log in"
    assert len(folder.trials()) == 1


def test_trials_and_budget_end_the_search(tmp_path: Path) -> None:
    search, folder, _ = make(tmp_path, answer(rates), SPEC.model_copy(update={"trials": 2}))
    assert search.run().why == "all trials were used"
    assert len(folder.trials()) == 2
    (tmp_path / "b").mkdir()
    search, folder, _ = make(tmp_path / "b", answer(rates), SPEC.model_copy(update={"budget_s": 100.0}))
    assert "budget" in search.run().why
    assert len(folder.trials()) == 2


def test_a_study_keeps_what_its_numbers_mean() -> None:
    check_resume(SPEC, None)
    check_resume(SPEC.model_copy(update={"trials": 99}), SPEC)
    with pytest.raises(InputError, match="other fixed"):
        check_resume(SPEC.model_copy(update={"fixed": {"dtype": "half"}}), SPEC)


def test_a_space_that_is_one_point(tmp_path: Path) -> None:
    search, folder, _ = make(tmp_path, answer(rates), SPEC)
    assert isinstance(search, Search)
    assert Space({}).size == 0
    assert list(Space({}).candidates()) == []
    assert folder.trials() == []
