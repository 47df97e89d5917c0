"""One trial on the simulator: probe, loads, judgement, constants."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autotune.engines import sim
from autotune.errors import InputError
from autotune.physics.lengths import observed_lengths
from autotune.records.event import Event
from autotune.records.lengths import AnswerLength, Lengths
from autotune.records.settings import Settings
from autotune.records.trial import ConcurrencyPlan, EngineSpec, ProbeSpec, TrialTask, WorkloadSpec
from autotune.search import serverlife
from autotune.search.trial import run_trial

ENGINE = EngineSpec(kind="sim", model="Qwen/Qwen3-32B", gpus="2xH200")
HLE = WorkloadSpec(name="hle")


@pytest.fixture
def questions(tmp_path: Path) -> WorkloadSpec:
    path = tmp_path / "q.jsonl"
    path.write_text("".join(f'{{"id": "q{i}", "prompt": "{"word " * (20 + i % 30)}{i}"}}\n' for i in range(200)))
    return WorkloadSpec(name="jsonl", path=str(path), max_tokens=3_000)


def task(workload: WorkloadSpec = HLE, **changes: Any) -> TrialTask:
    values: dict[str, Any] = {
        "number": 3,
        "kind": "search",
        "settings": Settings(tensor_parallel_size=2, max_num_seqs=256, gpu_memory_utilization=0.9),
        "engine": ENGINE,
        "workload": workload,
        "concurrency": ConcurrencyPlan(values=(8, 32, 60)),
        **changes,
    }
    return TrialTask(**values)


def test_known_lengths_need_no_probe_and_half_a_minute_a_load(tmp_path: Path) -> None:
    done = run_trial(task(probe=ProbeSpec(), folder=str(tmp_path / "attempt")))
    assert (done.state, done.lengths, done.notes) == ("COMPLETE", None, ())
    assert [load.outcome for load in done.loads] == ["steady"] * 3
    assert max(load.load_s for load in done.loads) < 70
    assert all(load.correction is not None and load.correction.constants == "fitted" for load in done.loads)
    assert len(list((tmp_path / "attempt").glob("observation-*.json"))) == 3
    assert done.step_s is not None
    assert set(done.step_s) == {"t0_s", "sequence_s", "kv_token_s", "prefill_token_s", "beyond_s", "rms"}
    assert done.step_s["rms"] < 0.02
    truth = sim.SimEngine(ENGINE).hidden_truth(done.settings).model
    assert done.step_s["t0_s"] == pytest.approx(truth.t0_s, rel=0.1)


def test_unknown_lengths_are_probed_once_and_then_known(questions: WorkloadSpec, tmp_path: Path) -> None:
    told: list[str] = []

    def emit(event: Event) -> None:
        if event.kind == "note":
            told.append(str(event.data["text"]))

    first = run_trial(task(questions, probe=ProbeSpec(), answers=str(tmp_path / "answers")), emit=emit)
    assert first.state == "COMPLETE"
    assert first.lengths is not None
    assert len(first.lengths.answers) == 128
    assert [text[:6] for text in told] == ["probe:", "probe "]
    assert first.loads[0].truncated_share == observed_lengths(first.lengths, 3_000, prior=True).law.cut_share
    second = run_trial(task(questions, probe=ProbeSpec(), lengths=first.lengths), emit=emit)
    assert len(told) == 2
    assert second.lengths is None
    assert [load.outcome for load in second.loads] == ["steady"] * 3
    assert first.total_s > second.total_s + 30  # the probe counts


def test_without_a_probe_unknown_lengths_start_fresh(questions: WorkloadSpec) -> None:
    done = run_trial(task(questions, concurrency=ConcurrencyPlan(values=(32,))))
    (load,) = done.loads
    # Nearly all answers are cut at the limit: from a fresh start they march in step, and are not believed.
    assert (load.outcome, load.correction) == ("invalid", None)
    assert load.invalid_reasons[0].startswith("lock_step")
    assert load.load_s > 90
    assert done.step_s is None


def test_a_probe_alone_measures_nothing(questions: WorkloadSpec) -> None:
    done = run_trial(task(questions, kind="probe", probe=ProbeSpec(questions=64)))
    assert (done.state, done.loads, done.best) == ("COMPLETE", (), None)
    assert done.lengths is not None
    short = run_trial(task(questions, kind="probe", probe=ProbeSpec(limit_s=0.5)))
    assert (short.state, short.lengths) == ("FAIL", None)


def test_a_server_that_dies_under_the_probe_is_data(questions: WorkloadSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim.engine, "SimWorld", lambda seed, tilt: sim.SimWorld(seed, oom_above=0.5))
    done = run_trial(task(questions, probe=ProbeSpec()))
    assert (done.state, done.loads, done.lengths) == ("PRUNED", (), None)
    assert done.failure is not None
    assert done.failure.kind == "oom"


def test_a_given_law_is_forced_on_any_questions(questions: WorkloadSpec) -> None:
    done = run_trial(task(questions, law="hle-reasoning", concurrency=ConcurrencyPlan(values=(40,))))
    (load,) = done.loads
    assert load.outcome == "steady"
    assert load.mean_output_tokens == pytest.approx(2_950, rel=0.03)  # nearly all are cut at 3,000
    assert load.low is not None
    assert load.paired_low is not None
    assert load.low < load.paired_low  # it is not the run's own law


def test_observed_lengths_are_cut_at_the_limit(questions: WorkloadSpec) -> None:
    seen = Lengths(
        prompt_tokens=(50,),
        answers=tuple(AnswerLength(tokens=500 * i, ended=True) for i in range(1, 13)),
        max_tokens=8_000,
        source="file",
    )
    done = run_trial(task(questions, lengths=seen, concurrency=ConcurrencyPlan(values=(16,))))
    assert done.loads[0].truncated_share == pytest.approx(7 / 12)


def test_random_weights_are_said_and_some_flags_refused() -> None:
    dummy = replace(ENGINE, fixed=Settings(load_format="dummy"))
    done = run_trial(task(engine=dummy, concurrency=ConcurrencyPlan(values=(16,))))
    assert "random weights" in done.notes[0]
    assert done.loads[0].low is not None
    assert done.loads[0].low < (done.loads[0].paired_low or 0)  # the law is assumed
    with pytest.raises(InputError, match="speculative_config is not tried"):
        run_trial(task(engine=dummy, settings=Settings(speculative_config={"method": "ngram"})))


def test_the_limit_of_a_trial_ends_its_loads() -> None:
    done = run_trial(task(trial_limit_s=1.0))
    assert done.loads == ()


def test_constants_need_more_than_one_batch() -> None:
    done = run_trial(task(concurrency=ConcurrencyPlan(values=(8, 32))))
    assert len(done.loads) == serverlife.FEWEST_ROWS - 1
    assert done.step_s is None


def test_latencies_need_a_real_server() -> None:
    with pytest.raises(InputError, match="no latencies"):
        run_trial(task(measure=replace(task().measure, max_ttft_s=1.0)))
