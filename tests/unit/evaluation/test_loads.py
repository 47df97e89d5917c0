"""A workload made ready for one server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.engines.sim import SimEngine, SimWorld
from autotune.evaluation.loads import Loads, asked
from autotune.records.settings import Settings
from autotune.records.trial import EngineSpec, TrialTask, WorkloadSpec

SIM = EngineSpec(kind="sim", model="Qwen/Qwen3-32B", gpus="8xH200")
VLLM = EngineSpec(kind="vllm", model="Qwen/Qwen3-32B")
HLE = WorkloadSpec(name="hle")


def loads(workload: WorkloadSpec, settings: Settings | None = None) -> Loads:
    task = TrialTask(number=0, kind="search", settings=settings or Settings(), engine=SIM, workload=workload)
    with SimEngine(SIM, world=SimWorld(0)).session(task.settings) as session:
        return Loads(task, session)


def test_where_nobody_answers_in_earnest_lengths_stand_for_the_questions() -> None:
    dummy = replace(VLLM, fixed=Settings(load_format="dummy"))
    for engine in (SIM, dummy):
        found = asked(engine, replace(HLE, max_tokens=9000, limit=50, official_prompt=True))
        assert found == WorkloadSpec(name="synthetic", law="hle-reasoning", max_tokens=9000, limit=50)


@pytest.mark.parametrize(
    ("engine", "workload"),
    [
        (VLLM, HLE),
        (SIM, replace(HLE, path="/data/hle")),
        (SIM, WorkloadSpec(name="jsonl", path="q.jsonl")),
        (SIM, WorkloadSpec(name="synthetic")),
    ],
)
def test_elsewhere_the_questions_are_asked(engine: EngineSpec, workload: WorkloadSpec) -> None:
    assert asked(engine, workload) is workload


def test_the_law_s_requests_need_no_tokenizer_and_are_forced() -> None:
    made = loads(HLE)
    assert made.available == 2158
    assert made.set_aside == 0
    assert made.answers is not None
    assert made.answers.law.mean == pytest.approx(10_024, rel=0.01)
    load = made.load(100, 0)
    assert load.plan.concurrency == 100
    assert load.known is not None  # it starts in its steady state
    assert load.planned is not None  # every length is forced
    assert all(r.prompt for r in load.plan.start)


def test_questions_of_a_file_are_counted_by_the_simulator(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "' + "why " * 100 + '"}\n{"prompt": "' + "x" * 8000 + '"}\n')
    made = loads(WorkloadSpec(name="jsonl", path=str(path), max_tokens=100), Settings(max_model_len=1000))
    assert (made.available, made.set_aside) == (1, 1)
    assert made.answers is None
    assert "2005 tokens" in made.notes[0]
    assert made.load(1, 0).plan.start[0].prompt_tokens == 105
