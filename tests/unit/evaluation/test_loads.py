"""A workload made ready for one server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from autotune.engines.sim import SimEngine, SimWorld
from autotune.evaluation.loads import KNOWN_ROUNDS, Loads, asked
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
    assert made.forced
    assert made.available == 2158
    assert made.set_aside == 0
    plan = made.plan(100, 0)
    assert plan.concurrency == 100
    assert sum(r.max_tokens for r in plan.start) / 100 == pytest.approx(10_024, rel=0.15)
    assert all(r.prompt_tokens == len(r.prompt or ()) for r in plan.start)


def test_long_answers_need_fewer_requests_at_hand() -> None:
    many = loads(WorkloadSpec(name="synthetic", mean_output_tokens=50)).plan(512, 0)
    few = loads(HLE).plan(512, 0)
    assert len(few.refill) == KNOWN_ROUNDS * 512
    assert len(many.refill) > 4 * len(few.refill)
    assert len(loads(HLE).plan(8, 0).refill) * 10_024 > 25_000_000


def test_questions_of_a_file_are_counted_by_the_simulator(tmp_path: Path) -> None:
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "' + "why " * 100 + '"}\n{"prompt": "' + "x" * 8000 + '"}\n')
    made = loads(WorkloadSpec(name="jsonl", path=str(path), max_tokens=100), Settings(max_model_len=1000))
    assert not made.forced
    assert (made.available, made.set_aside) == (1, 1)
    assert "2005 tokens" in made.notes[-1]
    assert made.plan(1, 0).start[0].prompt_tokens == 105
