from __future__ import annotations

import dataclasses
import itertools
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from typing import Any

import pytest

from autotune.engines.driver import Target, drive, exchange, loop, watch
from autotune.errors import PrerequisiteError
from autotune.records.event import Event
from autotune.records.load import LoadPlan, Message, Request
from autotune.records.observation import Failure, Observation, RequestOutcome
from tests.fakes import null_server as faults
from tests.fakes.null import Null


@pytest.fixture(scope="module")
def server() -> Iterator[Null]:
    null = Null()
    yield null
    null.close()


@pytest.fixture
def null(server: Null) -> Null:
    server.configure()
    return server


def ask(i: int, fault: int = faults.PLAIN, tokens: int = 5, **fields: Any) -> Request:
    return Request(id=f"r{i}", prompt=(fault, i), max_tokens=tokens, **fields)


def plan(*requests: Request, n: int, **fields: Any) -> LoadPlan:
    return LoadPlan(start=requests[:n], refill=requests[n:], **fields)


def run(target: Target, load: LoadPlan, **changes: Any) -> Observation:
    arguments: dict[str, Any] = {"stop": lambda seen: None, "alive": lambda: None, "sample_s": 0.05, "limit_s": 30.0}
    return drive(target, load, **{**arguments, **changes})


def by_id(observation: Observation) -> dict[str, RequestOutcome]:
    return {r.id: r for r in observation.requests}


@pytest.mark.parametrize(("n", "total"), [(1, 5), (2, 9), (16, 100), (300, 900)])
def test_exactly_n_are_in_flight(null: Null, n: int, total: int) -> None:
    # The server ends an answer only while n requests are here: a driver that holds n - 1 hangs, one that
    # holds n + 1 too.
    null.configure(gate={"concurrency": n, "total": total}, token_s=0.0005)
    load = plan(*[ask(i, tokens=2 + i % 7) for i in range(total)], n=n)
    seen = run(null.target(), load)
    assert seen.end == "drained"
    assert null.seen()["most"] == n
    assert len(seen.requests) == total
    assert all(r.error is None and r.ended_s is not None for r in seen.requests)
    assert (seen.client.in_flight_min, seen.client.in_flight_max) == (n, n)


def test_start_goes_out_at_once_and_refill_in_order(null: Null) -> None:
    null.configure(gate={"concurrency": 8, "total": 60})
    load = plan(*[ask(i, tokens=3 + i % 5) for i in range(60)], n=8)
    seen = run(null.target(), load)
    assert [r.id for r in seen.requests] == [f"r{i}" for i in range(60)]
    assert sorted(null.seen()["arrived"][:8]) == list(range(8))
    sent = [r.sent_s for r in seen.requests]
    assert sent == sorted(sent)
    # Each refill follows an end.
    ends = sorted(r.ended_s or 0 for r in seen.requests)
    assert all(a <= b for a, b in zip(ends, sent[8:], strict=False))


def test_an_answer_is_written_down(null: Null) -> None:
    seen = run(null.target(), plan(ask(0, tokens=12), n=1))
    (r,) = seen.requests
    assert (r.prompt_tokens, r.output_tokens, r.finish_reason, r.error) == (2, 12, "length", None)
    assert (r.text, r.ttft_s, r.itl_s) == (None, None, None)
    assert r.ended_s is not None
    assert 0 <= r.sent_s < r.ended_s <= seen.t_s
    assert null.seen()["headers"]["path"] == "/v1/completions"


def test_a_streamed_answer_has_its_times(null: Null) -> None:
    null.configure(token_s=0.01)
    load = plan(ask(0, tokens=20), ask(1, tokens=1), n=1, stream=True, keep_text=True)
    first, second = run(null.target(), load).requests
    assert first.ttft_s is not None
    assert first.itl_s is not None
    assert first.ended_s is not None
    assert first.output_tokens == 20
    assert first.text == "x " * 20
    assert 0 < first.ttft_s + 19 * first.itl_s <= first.ended_s - first.sent_s
    assert (second.itl_s, second.output_tokens) == (None, 1)
    assert second.ttft_s is not None


def test_a_stream_that_is_given_up_keeps_the_time_to_its_first_token(null: Null) -> None:
    null.configure(token_s=0.02)
    load = plan(ask(0, tokens=500), ask(1, tokens=500), n=2, stream=True)
    seen = run(null.target(), load, stop=lambda so_far: "enough" if so_far.t_s > 0.5 else None)
    assert [(r.ended_s, r.ttft_s is None) for r in seen.requests] == [(None, False), (None, False)]
    assert all(0 < (r.ttft_s or 0) < 0.4 for r in seen.requests)
    plain = run(
        null.target(), plan(ask(2, tokens=500), n=1), stop=lambda so_far: "enough" if so_far.t_s > 0.3 else None
    )
    assert plain.requests[0].ttft_s is None


def test_chat_goes_the_same_way(null: Null) -> None:
    requests = [Request(id=f"c{i}", messages=(Message(role="user", content=f"1 {i}"),), max_tokens=4) for i in range(4)]
    for stream in (False, True):
        seen = run(null.target(), plan(*requests, n=2, stream=stream, keep_text=True))
        assert [r.text for r in seen.requests] == ["x " * 4] * 4
        assert [r.output_tokens for r in seen.requests] == [4] * 4
    assert null.seen()["headers"]["path"] == "/v1/chat/completions"


FAULTS = [
    (faults.ERROR_INSIDE, "server", "engine broke"),
    (faults.NO_FINISH, "incomplete", "finish_reason"),
    (faults.NO_JSON, "incomplete", "JSON"),
    (faults.ABORTED, "server", "abort"),
    (faults.DROP, "connect", ""),
    (faults.HTML, "incomplete", ""),
    (500, "server", "500"),
    (404, "client", "404"),
    (302, "client", "302"),
]


@pytest.mark.parametrize("stream", [False, True])
def test_each_failure_has_its_kind_and_the_load_goes_on(null: Null, stream: bool) -> None:
    late = [(faults.DROP_LATE, "connect", "")]
    cases = [*FAULTS, *late, *([(faults.NO_DONE, "incomplete", "[DONE]")] if stream else [])]
    # One lane works, the other ones meet one fault each.
    plain = [ask(100 + i) for i in range(3)]
    load = LoadPlan(start=(plain[0], *(ask(i, case[0]) for i, case in enumerate(cases))), stream=stream)
    seen = by_id(run(null.target(), load))
    assert seen["r100"].error is None
    for i, (fault, kind, text) in enumerate(cases):
        error = seen[f"r{i}"].error
        assert error is not None, fault
        assert (fault, error.kind) == (fault, kind)
        assert text in error.message
        assert seen[f"r{i}"].ended_s is not None
        assert seen[f"r{i}"].output_tokens is None


def test_a_late_answer_is_cut_and_its_connection_closed(null: Null) -> None:
    load = plan(ask(0, faults.HANG), ask(1), ask(2), n=1, request_limit_s=0.2)
    seen = by_id(run(null.target(), load))
    error = seen["r0"].error
    assert error is not None
    assert error.kind == "timeout"
    assert (seen["r0"].ended_s or 0) >= 0.19
    assert seen["r2"].error is None
    assert null.seen()["gone"] == 1


def test_a_socket_that_never_answers_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        target = Target(base_url=f"http://127.0.0.1:{deaf.getsockname()[1]}", model="m")
        seen = run(target, plan(*[ask(i) for i in range(3)], n=3, request_limit_s=0.3))
    assert [r.error and r.error.kind for r in seen.requests] == ["timeout"] * 3
    assert seen.samples == ()


def test_a_refused_first_request_ends_the_load(null: Null) -> None:
    load = plan(*[ask(i, 400) for i in range(50)], n=4)
    seen = run(null.target(api_key="sk-secret"), load)
    assert seen.end == "stopped:client_error"
    assert seen.failure is not None
    assert "400" in seen.failure.line
    assert null.seen()["headers"]["authorization"] == "bearer sk-secret"
    assert len(null.seen()["arrived"]) <= 8


def test_no_secret_and_no_question_gets_into_the_records(null: Null) -> None:
    load = plan(ask(0, 500), ask(1), n=1)
    error = run(null.target(api_key="sk-secret"), load).requests[0].error
    assert error is not None
    # The null server echoes the header, in lower case, and the question.
    assert "secret text" not in error.message
    case = run(null.target(api_key="bearer-is-lower"), load).requests[0].error
    assert case is not None
    assert "bearer ***" in case.message


def test_a_refusal_later_on_does_not_end_it(null: Null) -> None:
    seen = run(null.target(), plan(ask(0), ask(1, 400), ask(2), n=1))
    assert seen.end == "drained"
    assert [r.error and r.error.kind for r in seen.requests] == [None, "client", None]


def test_a_failed_lane_waits_and_is_missed(null: Null) -> None:
    seen = run(null.target(), plan(ask(0, 500), ask(1, tokens=400), ask(2), ask(3), n=2))
    failed, again = by_id(seen)["r0"], by_id(seen)["r2"]
    assert again.sent_s - (failed.ended_s or 0) >= loop.BACKOFF_S * 0.9
    assert (seen.client.in_flight_min, seen.client.in_flight_max) == (1, 2)


def test_the_end_cancels_what_is_in_flight_at_the_server_too(null: Null) -> None:
    null.configure(token_s=0.01)
    load = plan(*[ask(i, tokens=100_000) for i in range(40)], n=20)
    seen = run(null.target(), load, stop=lambda so_far: "enough" if so_far.t_s > 0.3 else None)
    assert seen.end == "stopped:enough"
    assert [r.ended_s for r in seen.requests] == [None] * 20
    assert all(r.error is None for r in seen.requests)
    after = null.seen()
    assert (after["active"], after["gone"]) == (0, 20)


def test_the_rule_sees_the_load_grow(null: Null) -> None:
    views: list[Observation] = []

    def stop(so_far: Observation) -> str | None:
        views.append(so_far)
        return None

    seen = run(null.target(), plan(*[ask(i, tokens=40) for i in range(40)], n=4), stop=stop)
    assert len(views) > 5
    assert {view.end for view in views} == {"running"}
    assert all(a.t_s < b.t_s and a.samples == b.samples[: len(a.samples)] for a, b in itertools.pairwise(views))
    assert all(len(v.requests) - sum(r.ended_s is not None for r in v.requests) <= 4 for v in views)
    times = [s.t_s for s in seen.samples]
    assert times == sorted(times)
    assert times[0] == 0.0
    assert times[-1] <= seen.t_s
    assert seen.samples[0].running == 0
    assert (seen.samples[-1].generation_tokens or 0) - (seen.samples[0].generation_tokens or 0) == 40 * 40
    assert max(s.running or 0 for s in seen.samples) == 4


@pytest.mark.parametrize("kind", ["off", "empty", "broken", "hang"])
def test_without_counters_there_are_no_samples_and_the_rule_is_asked_all_the_same(
    null: Null, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SCRAPE_LIMIT_S", 0.05)
    null.configure(metrics=kind, token_s=0.01)
    load = plan(*[ask(i, tokens=10_000) for i in range(2)], n=2)
    seen = run(null.target(), load, stop=lambda so_far: "enough" if so_far.t_s > 0.3 else None, stall_s=0.1)
    assert (seen.end, seen.samples) == ("stopped:enough", ())


def test_a_slow_page_is_dated_to_its_middle(null: Null) -> None:
    null.configure(metrics="slow", token_s=0.01)
    load = plan(ask(0, tokens=10_000), n=1)
    seen = run(null.target(), load, stop=lambda so_far: "enough" if so_far.t_s > 1.0 else None)
    gaps = [b.t_s - a.t_s for a, b in itertools.pairwise(seen.samples)]
    assert len(seen.samples) >= 2
    assert all(gap >= 0.2 for gap in gaps)
    assert seen.t_s - seen.samples[-1].t_s >= 0.19


def test_a_server_without_metrics_url_is_not_asked(null: Null) -> None:
    seen = run(null.target(metrics_url=None, health_url=None), plan(ask(0), ask(1, 500), ask(2), n=1))
    assert (seen.end, seen.samples) == ("drained", ())


def test_a_dead_process_ends_the_load_at_once(null: Null) -> None:
    null.configure(token_s=0.01)
    failure = Failure(kind="oom", line="CUDA out of memory")
    answers = iter([None, None, failure])
    load = plan(*[ask(i, tokens=100_000) for i in range(8)], n=8)
    seen = run(null.target(), load, alive=lambda: next(answers))
    assert (seen.end, seen.failure) == ("engine_died", failure)
    assert null.seen()["active"] == 0


def test_a_dead_engine_behind_a_living_front_end_is_found_by_its_health(null: Null) -> None:
    null.configure(die_after=6)
    seen = run(null.target(), plan(*[ask(i) for i in range(500)], n=4))
    assert seen.end == "engine_died"
    assert seen.failure is not None
    assert seen.failure.kind == "engine_died"
    assert "/health: 503" in seen.failure.line
    # It was not hammered through the refill.
    assert len(seen.requests) < 40


def test_nothing_listening_is_a_dead_engine() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    target = Target(base_url=url, model="m", metrics_url=f"{url}/metrics", health_url=f"{url}/health")
    seen = run(target, plan(*[ask(i) for i in range(100)], n=4))
    assert seen.end == "engine_died"
    assert seen.failure is not None
    assert "nothing listens any more" in seen.failure.line
    assert {r.error.kind for r in seen.requests if r.error} == {"connect"}
    assert seen.samples == ()


def test_a_failed_request_of_a_healthy_server_is_no_death(null: Null) -> None:
    seen = run(null.target(), plan(ask(0, 500), ask(1, tokens=500), ask(2), n=2))
    assert seen.end == "drained"


def test_a_health_page_that_does_not_answer_proves_nothing(monkeypatch: pytest.MonkeyPatch, null: Null) -> None:
    monkeypatch.setattr(watch, "HEALTH_LIMIT_S", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/health"
        seen = run(null.target(health_url=url), plan(ask(0, 500), ask(1, tokens=600), n=2))
    assert seen.end == "drained"


def test_a_name_that_does_not_resolve_proves_nothing(null: Null) -> None:
    url = "http://no-such-host.invalid/health"
    seen = run(null.target(health_url=url), plan(ask(0, 500), ask(1, tokens=600), n=2))
    assert seen.end == "drained"


def test_a_stall_ends_the_load(null: Null) -> None:
    null.configure(metrics="frozen")
    load = plan(*[ask(i, faults.HANG) for i in range(3)], n=3)
    seen = run(null.target(), load, stall_s=0.3)
    assert seen.end == "stalled"
    assert seen.failure is not None
    assert seen.failure.kind == "stalled"
    assert "3 running, 0 waiting" in seen.failure.line


def test_tokens_chunks_and_ends_are_signs_of_life(null: Null) -> None:
    null.configure(token_s=0.01)
    whole = plan(ask(0, tokens=90), n=1)
    assert run(null.target(), whole, stall_s=0.6).end == "drained"
    stream = dataclasses.replace(whole, stream=True)
    assert run(null.target(metrics_url=None), stream, stall_s=0.6).end == "drained"
    null.configure(metrics="frozen", token_s=0.001)
    many = plan(*[ask(i, tokens=20) for i in range(40)], n=1)
    assert run(null.target(), many, stall_s=0.6).end == "drained"


def test_a_streamed_stall_needs_no_counters(null: Null) -> None:
    load = plan(ask(0, faults.HANG), n=1, stream=True)
    seen = run(null.target(metrics_url=None), load, stall_s=0.3)
    assert seen.end == "stalled"


def test_the_limit_ends_the_load(null: Null) -> None:
    null.configure(token_s=0.01)
    seen = run(null.target(), plan(ask(0, tokens=100_000), n=1), limit_s=0.4)
    assert seen.end == "limit"
    assert seen.t_s >= 0.39


def test_a_server_that_stays_busy_is_noted(null: Null, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "IDLE_LIMIT_S", 0.3)
    null.configure(metrics="busy")
    events: list[Event] = []
    run(null.target(), plan(ask(0), n=1), emit=events.append)
    assert events[-1].kind == "note"
    assert "still holds" in str(events[-1].data["text"])


def test_events_tell_how_it_goes(null: Null) -> None:
    events: list[Event] = []
    run(null.target(), plan(*[ask(i, tokens=100) for i in range(8)], n=4), emit=events.append)
    assert {e.kind for e in events} == {"load_sampled"}
    assert all(e.data["concurrency"] == 4 for e in events)
    rate = events[-1].data["output_tokens_per_s"]
    assert isinstance(rate, float)
    assert rate > 0
    assert json.dumps([dict(e.data) for e in events])


def test_pace_and_stall_come_from_the_plan(null: Null) -> None:
    null.configure(metrics="frozen")
    load = plan(ask(0, faults.HANG), n=1, sample_s=0.1, stall_s=0.35)
    seen = drive(null.target(), load, stop=lambda so_far: None, alive=lambda: None)
    assert seen.end == "stalled"
    assert len(seen.samples) <= 8


def test_the_client_knows_its_own_cost(null: Null) -> None:
    load = plan(*[ask(i, tokens=3) for i in range(300)], n=10)

    def stop(so_far: Observation) -> str | None:
        time.sleep(0.03)
        return None

    quick, slow = run(null.target(), load), run(null.target(), load, stop=stop)
    assert 0 < quick.client.cpu_s < quick.t_s + 0.1
    assert slow.client.loop_lag_p99_s >= 0.01


@pytest.mark.parametrize("where", ["stop", "alive"])
def test_a_bug_of_ours_is_not_hidden(null: Null, where: str) -> None:
    def broken(*_: object) -> Any:
        raise RuntimeError("our bug")

    with pytest.raises(RuntimeError, match="our bug"):
        run(null.target(), plan(ask(0, tokens=100_000), n=1), **{where: broken})


SCRIPT = """
    import signal, sys
    from autotune.engines.driver import Target, drive
    from autotune.records.load import LoadPlan, Request

    def leave(number, frame):
        sys.exit(143)

    signal.signal(signal.SIGTERM, leave)
    start = tuple(Request(id=f"r{i}", prompt=(1, i), max_tokens=1000000) for i in range(30))
    said = []

    def stop(so_far):
        if not said:
            print("loading", flush=True)
            said.append(1)

    url = sys.argv[1]
    target = Target(base_url=url, model="m", metrics_url=url + "/metrics")
    drive(target, LoadPlan(start=start), stop=stop, alive=lambda: None, sample_s=0.05)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, -signal.SIGINT)])
def test_a_signal_gets_out_and_leaves_nothing_in_flight(null: Null, number: signal.Signals, code: int) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), null.base_url],
        stdout=subprocess.PIPE,
        text=True,
        stderr=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "loading\n"
    child.send_signal(number)
    _, stderr = child.communicate(timeout=20)
    assert child.returncode == code
    assert "Task" not in stderr
    until = time.monotonic() + 5
    while null.seen()["active"] and time.monotonic() < until:
        time.sleep(0.05)
    assert null.seen()["active"] == 0
    assert null.seen()["most"] == 30


def test_a_lane_backs_off_further_and_further(monkeypatch: pytest.MonkeyPatch, null: Null) -> None:
    monkeypatch.setattr(loop, "BACKOFF_S", 0.05)
    seen = run(null.target(), plan(*[ask(i, 500) for i in range(4)], n=1))
    waits = [b.sent_s - (a.ended_s or 0) for a, b in itertools.pairwise(seen.requests)]
    assert waits[0] >= 0.04
    assert waits[1] >= 0.09
    assert waits[2] >= 0.18


def test_open_files_are_raised_to_what_the_load_needs(null: Null) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
    try:
        seen = run(null.target(), plan(*[ask(i) for i in range(150)], n=100))
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 100
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [r.error for r in seen.requests] == [None] * 150


def test_more_in_flight_than_open_files_is_refused(monkeypatch: pytest.MonkeyPatch, null: Null) -> None:
    monkeypatch.setattr(exchange.resource, "getrlimit", lambda _: (256, 256))
    with pytest.raises(PrerequisiteError, match="200 requests in flight need 328 open files"):
        run(null.target(), plan(*[ask(i) for i in range(200)], n=200))


def test_a_connection_idle_for_long_is_not_used_again() -> None:
    assert exchange.KEEP_ALIVE_S < 5  # vLLM's own limit
