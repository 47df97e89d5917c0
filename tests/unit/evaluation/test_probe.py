"""The length probe: plan, cost, censored answers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from autotune.engines.sim import SimEngine, SimWorld
from autotune.evaluation.loads import Loads
from autotune.evaluation.probe import (
    FEWEST,
    answer_lengths,
    lengths_fingerprint,
    plan_probe,
    run_probe,
    written_so_far,
)
from autotune.physics.laws import lognormal_law
from autotune.physics.lengths import observed_lengths
from autotune.records.observation import ClientStats, Observation, RequestError, RequestOutcome, Sample
from autotune.records.settings import Settings
from autotune.records.trial import EngineSpec, ProbeSpec, TrialTask, WorkloadSpec

LIMIT = 2_000
LAW = lognormal_law(mean=700, sigma=0.8, max_tokens=None)
CLIENT = ClientStats(cpu_s=0.1, loop_lag_p99_s=0.0, in_flight_min=1, in_flight_max=1)


@pytest.fixture
def questions(tmp_path: Path) -> WorkloadSpec:
    path = tmp_path / "q.jsonl"
    path.write_text("".join(f'{{"id": "q{i}", "prompt": "{"word " * (20 + i % 30)}{i}"}}\n' for i in range(300)))
    return WorkloadSpec(name="jsonl", path=str(path), max_tokens=LIMIT)


def engine(gpus: str = "1xH200") -> SimEngine:
    return SimEngine(
        EngineSpec(kind="sim", model="Qwen/Qwen3-32B", gpus=gpus), world=SimWorld(4, oom_above=1.0), law=LAW
    )


def task(workload: WorkloadSpec, **settings: int) -> TrialTask:
    spec = EngineSpec(kind="sim", model="Qwen/Qwen3-32B", gpus="1xH200")
    return TrialTask(number=0, kind="probe", settings=Settings(**settings), engine=spec, workload=workload)


def test_a_probe_finds_the_law(questions: WorkloadSpec) -> None:
    job = task(questions, max_num_seqs=256, max_model_len=4096)
    with engine().session(job.settings) as session:
        loads = Loads(job, session)
        assert loads.answers is None
        plan = plan_probe(loads, ProbeSpec(limit_s=3600), session.capacity, max_tokens=LIMIT, seed=0)
        assert len(plan.questions) == plan.concurrency == 128  # all at once: the cache holds them
        found = run_probe(loads, session, plan, "f")
        assert found.failure is None
        assert found.lengths is not None
        assert plan.seconds == pytest.approx(found.observation.t_s, rel=0.5)
        loads.learn(found.lengths)
        assert loads.answers is not None
        assert loads.load(20, 0).known is not None
    truth = LAW.capped(LIMIT)
    assert loads.answers.law.mean == pytest.approx(truth.mean, rel=0.2)
    assert loads.answers.law.cut_share == pytest.approx(truth.cut_share, abs=0.08)
    assert len(found.lengths.answers) == 128
    assert len(found.lengths.prompt_tokens) == 300
    assert (found.lengths.source, found.lengths.fingerprint, found.lengths.max_tokens) == ("probe", "f", LIMIT)
    assert "answers ended" in found.text
    assert {q.id for q in plan.questions} == {r.id for r in found.observation.requests}


def test_a_probe_that_is_stopped_early_is_still_used(questions: WorkloadSpec) -> None:
    job = task(questions, max_num_seqs=256, max_model_len=4096)
    with engine().session(job.settings) as session:
        loads = Loads(job, session)
        plan = plan_probe(loads, ProbeSpec(limit_s=15), session.capacity, max_tokens=LIMIT, seed=0)
        found = run_probe(loads, session, plan, "f")
    assert found.observation.end == "stopped:probe_limit"
    assert found.lengths is not None
    censored = [a.tokens for a in found.lengths.answers if not a.ended]
    assert len(found.lengths.answers) == 128
    assert len(censored) > 30
    assert max(censored) - min(censored) < 30  # all were sent at once
    ended = [a.tokens for a in found.lengths.answers if a.ended]
    law = observed_lengths(found.lengths, LIMIT, prior=True).law
    truth = LAW.capped(LIMIT)
    assert sum(ended) / len(ended) < 0.75 * truth.mean  # what dropping the others would say
    assert law.mean == pytest.approx(truth.mean, rel=0.25)
    assert law.source == "observed+prior"
    assert "still ran" in found.text


def test_too_few_ended_answers_are_no_lengths(questions: WorkloadSpec) -> None:
    job = task(questions, max_num_seqs=256, max_model_len=4096)
    with engine().session(job.settings) as session:
        loads = Loads(job, session)
        plan = plan_probe(loads, ProbeSpec(limit_s=1.5), session.capacity, max_tokens=LIMIT, seed=0)
        found = run_probe(loads, session, plan, "f")
    assert found.lengths is None
    assert "too few" in found.text
    assert loads.load(4, 0).known is None


def test_a_probe_fits_the_server(questions: WorkloadSpec) -> None:
    job = task(questions, max_num_seqs=40, max_model_len=4096)
    with engine().session(job.settings) as session:
        loads = Loads(job, session)
        few = plan_probe(loads, ProbeSpec(), session.capacity, max_tokens=LIMIT, seed=0)
        assert (few.concurrency, len(few.questions)) == (40, 128)
        small = dataclasses.replace(session.capacity, kv_tokens=9_000)
        assert plan_probe(loads, ProbeSpec(), small, max_tokens=LIMIT, seed=0).concurrency == 9
        tiny = dataclasses.replace(session.capacity, kv_tokens=100)
        plan = plan_probe(loads, ProbeSpec(), tiny, max_tokens=LIMIT, seed=0)
        assert (plan.concurrency, plan.seconds) == (1, None)
        silent = dataclasses.replace(session.capacity, kv_tokens=None, max_num_seqs=None)
        plan = plan_probe(loads, ProbeSpec(questions=64), silent, max_tokens=LIMIT, seed=0)
        assert (plan.concurrency, plan.seconds, len(plan.questions)) == (64, None, FEWEST)
        assert "no longer than 5 min" in plan.text
        assert "about" not in plan.text
        assert "about" in few.text
        run = run_probe(loads, session, dataclasses.replace(few, limit_s=3600), "f")
        assert len(run.answers) == 0  # the simulator writes no text
        assert run.observation.client.in_flight_max == 40


def seen(requests: list[RequestOutcome], samples: list[tuple[float, int, int]], t_s: float) -> Observation:
    return Observation(
        t_s=t_s,
        concurrency=2,
        samples=tuple(
            Sample(
                t_s=t,
                running=r,
                waiting=0,
                kv_usage=None,
                generation_tokens=g,
                prompt_tokens=None,
                preemptions=None,
                prefix_queries=None,
                prefix_hits=None,
            )
            for t, g, r in samples
        ),
        requests=tuple(requests),
        client=CLIENT,
        end="stopped:probe_limit",
    )


def outcome(
    name: str,
    sent: float,
    ended: float | None,
    tokens: int | None,
    reason: str | None = "stop",
    text: str | None = None,
) -> RequestOutcome:
    return RequestOutcome(
        id=name, sent_s=sent, ended_s=ended, prompt_tokens=5, output_tokens=tokens, finish_reason=reason, text=text
    )


def test_what_still_runs_is_shared_by_the_time_it_ran() -> None:
    # Two streams at 10 tokens/s each; one ends at 10 s with 100 tokens, another begins there.
    requests = [outcome("a", 0.0, 10.0, 100), outcome("b", 0.0, None, None, None), outcome("c", 10.0, None, None, None)]
    samples = [(float(t), 1_000 + 20 * t, 2) for t in range(21)]
    load = seen(requests, samples, 20.0)
    assert written_so_far(load) == [200, 100]
    assert [(a.tokens, a.ended) for a in answer_lengths(load)] == [(100, True), (200, False), (100, False)]
    assert written_so_far(dataclasses.replace(load, samples=load.samples[:1])) == []
    assert written_so_far(dataclasses.replace(load, requests=load.requests[:1])) == []
    idle = tuple(dataclasses.replace(s, generation_tokens=1_000) for s in load.samples)
    assert written_so_far(dataclasses.replace(load, samples=idle)) == []


def test_failed_requests_are_no_lengths_and_cut_ones_are_censored() -> None:
    failed = dataclasses.replace(
        outcome("a", 0.0, 3.0, None, None), error=RequestError(kind="server", message="500: broken")
    )
    load = seen([failed, outcome("b", 0.0, 5.0, 50, "length")], [(0.0, 0, 2), (5.0, 50, 0)], 5.0)
    assert [(a.tokens, a.ended) for a in answer_lengths(load)] == [(50, False)]


def test_a_fingerprint_names_model_and_workload(questions: WorkloadSpec) -> None:
    job = task(questions)
    with engine().session(job.settings) as session:
        workload = Loads(job, session).workload
    one = lengths_fingerprint("a/b", workload)
    assert one == lengths_fingerprint("a/b", workload)
    assert one != lengths_fingerprint("a/c", workload)
    assert one != lengths_fingerprint("a/b", dataclasses.replace(workload, fingerprint="0" * 16))


@pytest.mark.parametrize("bad", [{"questions": 63}, {"questions": 1}, {"limit_s": 0}])
def test_a_probe_of_too_little_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="a probe"):
        ProbeSpec(**bad)
    assert ProbeSpec(questions=0).questions == 0
