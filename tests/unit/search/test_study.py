from __future__ import annotations

from pathlib import Path

import optuna
import pytest

from autotune.planning.space import Space, batch_covers_sequences
from autotune.records.settings import Settings
from autotune.search.loop import constraints
from autotune.search.study import Study
from tests.unit.search.results import result

SPACE = Space({"max_num_seqs": (8, 16, 32), "enforce_eager": (True, False), "compilation_config": ({"a": 1}, {"a": 2})})


def study(tmp_path: Path, space: Space = SPACE) -> Study:
    return Study(tmp_path / "journal.log", "s", space, seed=1)


def test_every_point_is_proposed_once_then_none(tmp_path: Path) -> None:
    one = study(tmp_path)
    seen = []
    while (asked := one.ask()) is not None:
        seen.append(asked.settings)
        one.tell(result(asked.number, 100.0 + asked.number, settings=asked.settings), {})
    assert len(seen) == len(set(seen)) == SPACE.size
    assert set(seen) == set(SPACE.candidates())
    assert one.running() == []


def test_forbidden_points_are_never_proposed(tmp_path: Path) -> None:
    space = Space({"max_num_seqs": (8, 64), "max_num_batched_tokens": (16, 128)}, (batch_covers_sequences,))
    one = study(tmp_path, space)
    seen = set()
    while (asked := one.ask()) is not None:
        seen.add(asked.settings)
        one.tell(result(asked.number, 1.0), {})
    assert seen == set(space.candidates())
    assert len(seen) == 3


def test_baselines_beside_the_grid_do_not_spoil_the_sampler(tmp_path: Path) -> None:
    one = study(tmp_path)
    one.enqueue(Settings(), "baseline", "vLLM defaults", {"concurrency": [8]})
    one.enqueue(Settings(max_num_seqs=8, enforce_eager=True, compilation_config={"a": 1}), "baseline", "on the grid")
    first, second = one.ask(), one.ask()
    assert first is not None
    assert second is not None
    assert (first.kind, first.label, first.settings, first.extra) == (
        "baseline",
        "vLLM defaults",
        Settings(),
        {"concurrency": [8]},
    )
    assert second.settings["max_num_seqs"] == 8
    for asked in (first, second):
        one.tell(result(asked.number, 10.0), {"kv_headroom": -0.1})
    for _ in range(8):
        asked = one.ask()
        assert asked is not None
        assert asked.kind == "search"
        assert asked.settings != second.settings
        one.tell(result(asked.number, 20.0), {})
    assert one.labels() == {"vLLM defaults", "on the grid"}


def test_failures_are_pruned_with_constraints_and_never_zero(tmp_path: Path) -> None:
    one = study(tmp_path)
    asked = one.ask()
    assert asked is not None
    bad = result(asked.number, None)
    one.tell(bad, constraints(bad))
    one.tell(bad, constraints(bad))  # twice is harmless
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal.log")))
    trial = optuna.load_study(study_name="s", storage=storage).trials[0]
    assert trial.state == optuna.trial.TrialState.PRUNED
    assert trial.values is None
    assert trial.constraints["launch"] == 1.0
    assert trial.user_attrs["failure"] == "kv_too_small"
    assert one.finished() == 1


def test_a_cut_off_trial_is_queued_again_at_most_once(tmp_path: Path) -> None:
    first = study(tmp_path)
    asked = first.ask()
    assert asked is not None
    again = study(tmp_path)
    assert again.running() == [asked.number]
    assert again.forget(asked.number)
    assert again.running() == []
    second = again.ask()
    assert second is not None
    assert (second.settings, second.retry) == (asked.settings, 1)
    third = study(tmp_path)
    assert not third.forget(second.number)
    fresh = third.ask()
    assert fresh is not None
    assert fresh.settings != asked.settings


def test_a_torn_journal_and_a_stale_lock_are_survived(tmp_path: Path) -> None:
    one = study(tmp_path)
    asked = one.ask()
    assert asked is not None
    one.tell(result(asked.number, 5.0), {})
    journal = tmp_path / "journal.log"
    journal.write_bytes(journal.read_bytes() + b'{"op_code": 4, "trial')
    (tmp_path / "journal.log.lock").symlink_to(journal)
    again = study(tmp_path)
    assert again.finished() == 1
    assert again.ask() is not None


def test_the_same_seed_asks_the_same(tmp_path: Path) -> None:
    def first_three(folder: Path) -> list[Settings]:
        folder.mkdir()
        one = study(folder)
        settings = []
        for _ in range(3):
            asked = one.ask()
            assert asked is not None
            settings.append(asked.settings)
            one.tell(result(asked.number, 7.0), {})
        return settings

    assert first_three(tmp_path / "a") == first_three(tmp_path / "b")


def test_it_converges_better_than_chance(tmp_path: Path) -> None:
    space = Space({f"k{i}": tuple(range(6)) for i in range(3)})
    values = []
    for seed in range(3):
        (tmp_path / str(seed)).mkdir()
        one = Study(tmp_path / str(seed) / "journal.log", "s", space, seed=seed)
        best = 0.0
        for _ in range(30):
            asked = one.ask()
            assert asked is not None
            rate = 100.0 + sum(int(str(asked.settings[f"k{i}"])) for i in range(3))
            best = max(best, rate)
            one.tell(result(asked.number, rate), {})
        values.append(best)
    assert sum(values) / len(values) >= 113.0


@pytest.mark.parametrize("choice", [{"a": 2}, True])
def test_choices_keep_their_type(tmp_path: Path, choice: object) -> None:
    space = Space({"flag": (choice, "x")})
    one = study(tmp_path, space)
    seen = []
    while (asked := one.ask()) is not None:
        seen.append(asked.settings["flag"])
        one.tell(result(asked.number, 1.0), {})
    assert sorted(map(str, seen)) == sorted(map(str, (choice, "x")))
    assert choice in seen
