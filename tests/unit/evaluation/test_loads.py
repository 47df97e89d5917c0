"""A workload made ready for one server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from autotune.engines.sim import SimEngine, SimWorld
from autotune.evaluation.loads import Loads, asked, has_salts, start_model
from autotune.records.observation import Capacity
from autotune.records.settings import Settings
from autotune.records.trial import EngineSpec, MeasureSpec, TrialTask, WorkloadSpec
from autotune.workloads.tokens import TokenCounter

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


@pytest.mark.parametrize(
    ("version", "salts"),
    [("0.8.5", False), ("0.9.0", True), ("0.32.0+cpu", True), ("1.0", True), ("dev", False), ("", False)],
)
def test_salts_came_with_vllm_0_9(version: str, salts: bool) -> None:
    assert has_salts({"vllm": version}) == salts
    assert not has_salts({})


def test_loads_of_servers_without_salts_ask_other_questions() -> None:
    made = loads(HLE)  # the simulator names no version of vLLM
    first, second = made.load(50, 0), made.load(50, 1)
    assert not {r.id for r in first.plan.start} & {r.id for r in second.plan.start}
    assert [r.max_tokens for r in first.plan.start] == [r.max_tokens for r in second.plan.start]
    assert {r.salt for r in first.plan.start} == {"trial-0-load-0"}


class Server:
    """A session of a server that tokenises, and nothing more."""

    capacity = Capacity(kv_tokens=100_000, engines=1, max_model_len=4096, max_num_seqs=8, source="log")
    versions: ClassVar = {"vllm": "0.32.0"}

    def __init__(self, *, tokenises: bool = True) -> None:
        self.tokenises = tokenises

    def token_ids(self, messages: Any, kwargs: Any = None) -> tuple[int, ...] | None:
        return (1, 2, *map(ord, messages[0].content)) if self.tokenises else None


def real(tmp_path: Path, **changes: Any) -> TrialTask:
    path = tmp_path / "q.jsonl"
    path.write_text("".join(f'{{"id": "q{i}", "prompt": "{chr(97 + i)} question"}}\n' for i in range(12)))
    workload = WorkloadSpec(name="jsonl", path=str(path), max_tokens=400)
    spec = replace(VLLM, model=str(tmp_path))  # a folder without a tokenizer
    return TrialTask(number=0, kind="search", settings=Settings(), engine=spec, workload=workload, **changes)


def test_a_real_server_s_loads_are_token_ids_of_the_prompts_words(tmp_path: Path) -> None:
    made = Loads(real(tmp_path, law="hle-reasoning"), Server())
    load = made.load(12, 0)
    assert load.known is not None
    assert load.known.slots == 8
    by_id = {r.id: r for r in load.plan.start}
    assert (by_id["q0"].prompt or ())[:4] == (1, 2, ord("a"), ord(" "))
    assert [r.context_tokens for r in load.plan.start[8:]] == [0] * 4  # those wait in the queue
    texts = {token for r in load.plan.start for token in (r.prompt or ())[r.prompt_tokens or 0 :]}
    assert texts <= {1, 2, *map(ord, "abcdefghijkl question")}
    assert not load.plan.stream


def test_without_token_ids_loads_start_fresh_and_it_is_said(tmp_path: Path) -> None:
    made = Loads(real(tmp_path, law="hle-reasoning"), Server(tokenises=False))
    load = made.load(4, 0)
    assert (load.known, load.planned) == (None, None)
    assert "start fresh" in made.notes[-1]


def test_answers_are_streamed_where_a_latency_is_limited(tmp_path: Path) -> None:
    for limit in ({"max_ttft_s": 1.0}, {"max_tpot_s": 0.05}):
        made = Loads(real(tmp_path, measure=MeasureSpec(**limit)), Server())
        assert made.load(4, 0).plan.stream


def test_recorded_answers_come_first_and_are_carried_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenCounter, "text_ids", lambda self, text: tuple(map(ord, text)))
    made = Loads(real(tmp_path, law="hle-reasoning"), Server())
    made.remember({"q7": "z" * 500, "other": "y"})
    made.remember({"q9": "x" * 500})
    start = made.load(8, 0).plan.start
    assert {start[0].id, start[1].id} == {"q7", "q9"}
    for request in start[:2]:
        written = (request.prompt or ())[request.prompt_tokens or 0 :]
        assert set(written) <= {ord("z" if request.id == "q7" else "x")}
        assert len(written) == request.context_tokens


def test_random_weights_force_the_shipped_law_on_any_questions(tmp_path: Path) -> None:
    task = real(tmp_path)
    dummy = replace(task, engine=replace(task.engine, fixed=Settings(load_format="dummy")))
    assert Loads(task, Server()).answers is None
    answers = Loads(dummy, Server()).answers
    assert answers is not None
    assert answers.law.source == "hle-reasoning"


def test_physics_of_what_is_not_known_is_none() -> None:
    assert start_model(SIM, Settings(tensor_parallel_size=8)) is not None
    assert start_model(VLLM, Settings()) is None
    assert start_model(replace(SIM, model="./nothing"), Settings()) is None
    assert start_model(replace(SIM, gpus="8xNothing"), Settings()) is None
