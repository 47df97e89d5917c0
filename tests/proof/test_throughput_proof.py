"""Our figures against those of ``vllm bench serve``, on one real vLLM server on the CPU.

    python -m pytest -m proof tests/proof/test_throughput_proof.py -s

Both clients stream the same questions in the same order with the same forced, mixed lengths at the same number
in flight, in turns (which of the two goes first changes). The measure of both is the server's own counter,
read once a second, over the same span of work: from the token at which the ramp is over to the token at which
the first place may stay empty. ``AUTOTUNE_PROOF_SPAN_S`` shortens the spans of 65 s (a try, not a proof).
"""

from __future__ import annotations

import itertools
import math
import os
import random
import re
import statistics
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

import autotune
from autotune.engines.control import Control
from autotune.engines.scrape import Reading, poll
from autotune.engines.vllm import VllmEngine, VllmSession
from autotune.records.load import LoadPlan, Message, Request, request_limit_s
from autotune.records.settings import Settings
from autotune.records.trial import EngineSpec
from autotune.testing import never
from tests.bench import vllm_bench
from tests.bench.vllm_bench import Prompt, Result
from tests.real_vllm import cpu_vllm

pytestmark = [pytest.mark.proof, pytest.mark.real_vllm, pytest.mark.timeout(3600)]

SPAN_S = float(os.environ.get("AUTOTUNE_PROOF_SPAN_S", "65"))
REPEATS = 3
CONCURRENCY = 16
WORDS = ("river", "stone", "paper", "cloud", "engine", "letter", "garden", "window", "silver", "number", "winter")
SHORTEST, LONGEST = 40, 360
"""Forced lengths, uniform: mixed, so that the loop never runs in lock step."""
COUNTER_LIMIT, PAIR_LIMIT, MEAN_LIMIT = 0.01, 0.03, 0.02

Points = list[tuple[float, float]]
"""Time in seconds, tokens since the start of the load."""


class Server:
    """The server under test, with its address for a client that is not ours."""

    def __init__(self, session: VllmSession, paths: cpu_vllm.Paths) -> None:
        self.session, self.paths = session, paths
        line = next(line for line in session.processes.values() if "--served-model-name" in line)
        self.name = _flag(line, "--served-model-name")
        self.base_url = f"http://127.0.0.1:{_flag(line, '--port')}"


def _flag(line: str, name: str) -> str:
    found = re.search(rf"{name}[ =](\S+)", line)
    assert found is not None, line
    return found[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    paths = cpu_vllm.install()
    spec = EngineSpec(
        kind="vllm",
        model=str(paths.model),
        vllm_command=f"{paths.vllm} serve",
        # No prefix cache: the second to ask the same questions must not find them answered.
        fixed=Settings(enforce_eager=True, max_model_len=1024, enable_prefix_caching=False),
    )
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    engine = VllmEngine(spec, folder=tmp_path_factory.mktemp("server"), environment=environment)
    with engine.session(Settings()) as session:
        yield Server(session, paths)


@pytest.fixture(scope="module")
def prompts(server: Server) -> list[Prompt]:
    """So many questions that the span lasts; a first load warms the server up and says how fast it is."""
    warm_up = ours(server, questions(2 * CONCURRENCY, seed=1))
    rate = warm_up[-1][1] / (warm_up[-1][0] - warm_up[0][0])
    mean = (SHORTEST + LONGEST) / 2
    needed = CONCURRENCY * (mean + LONGEST) + 1.2 * SPAN_S * rate
    return questions(math.ceil(needed / mean), seed=2)


def questions(count: int, *, seed: int) -> list[Prompt]:
    draw = random.Random(seed)
    return [
        Prompt(
            text=f"Question {n}: tell a story about " + " ".join(draw.choices(WORDS, k=draw.randint(5, 40))),
            output_tokens=draw.randint(SHORTEST, LONGEST),
        )
        for n in range(count)
    ]


def ours(server: Server, prompts: list[Prompt]) -> Points:
    """Our driver, streamed; the server's counter as the driver read it."""
    requests = tuple(
        Request(
            id=f"q{n}",
            messages=(Message(role="user", content=prompt.text),),
            max_tokens=prompt.output_tokens,
            forced=True,
        )
        for n, prompt in enumerate(prompts)
    )
    load = LoadPlan(
        start=requests[:CONCURRENCY],
        refill=requests[CONCURRENCY:],
        request_limit_s=request_limit_s(LONGEST),
        stream=True,
    )
    seen = server.session.observe(load, stop=never)
    assert seen.end == "drained"
    assert [r.error for r in seen.requests if r.error is not None] == []
    assert sum(r.output_tokens or 0 for r in seen.requests) == sum(p.output_tokens for p in prompts)
    assert (seen.client.in_flight_min, seen.client.in_flight_max) == (CONCURRENCY, CONCURRENCY)
    return since_start([(s.t_s, s.generation_tokens) for s in seen.samples])


def theirs(server: Server, prompts: list[Prompt], folder: Path) -> tuple[Points, Result]:
    """``vllm bench serve``; the server's counter as ``autotune scrape`` reads it beside it."""
    out = folder / f"bench-{time.monotonic_ns()}.json"
    argv = vllm_bench.command(
        server.paths.vllm,
        base_url=server.base_url,
        model=server.name,
        tokenizer=server.paths.model,
        dataset=vllm_bench.write_dataset(folder / "prompts.json", prompts),
        requests=len(prompts),
        concurrency=CONCURRENCY,
        out=out,
    )
    with Control(server.base_url) as control, CounterReader(control) as reader:
        result = vllm_bench.run(argv, out, timeout_s=300 + 10 * SPAN_S)
    assert (result.completed, result.failed) == (len(prompts), 0)
    assert result.lengths == [prompt.output_tokens for prompt in prompts]
    return reader.points(), result


class CounterReader:
    """Reads the counters once a second in a thread of its own."""

    def __init__(self, control: Control) -> None:
        self._readings: list[Reading] = []
        self._leave = threading.Event()
        self._control = control
        self._thread = threading.Thread(target=self._read)

    def __enter__(self) -> CounterReader:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._leave.set()
        self._thread.join()

    def _read(self) -> None:
        for reading in poll(self._control.metrics, every_s=1.0):
            self._readings.append(reading)
            if self._leave.is_set():
                return

    def points(self) -> Points:
        """On the clock of ``time.perf_counter()``."""
        shift = time.perf_counter() - time.time()
        found = [(r.t + shift, r.metrics.generation_tokens_total) for r in self._readings if r.metrics is not None]
        return since_start(found)


def since_start(readings: list[tuple[float, int | None]]) -> Points:
    known = [(t, tokens) for t, tokens in readings if tokens is not None]
    return [(t, tokens - known[0][1]) for t, tokens in known]


def passed(points: Points, tokens: float) -> float:
    """When so many tokens were there, between two readings in proportion."""
    for (t0, n0), (t1, n1) in itertools.pairwise(points):
        if n0 <= tokens <= n1 and n1 > n0:
            return t0 + (t1 - t0) * (tokens - n0) / (n1 - n0)
    raise AssertionError(f"{tokens} tokens were never reached, the last reading has {points[-1][1]}")


def edges(prompts: list[Prompt]) -> tuple[float, float]:
    """The span of work: after as many tokens as the first wave has; before the last question is sent at the latest."""
    total = sum(prompt.output_tokens for prompt in prompts)
    return CONCURRENCY * (SHORTEST + LONGEST) / 2, total - CONCURRENCY * LONGEST


def rate(points: Points, prompts: list[Prompt]) -> tuple[float, float]:
    """Tokens per second over the span of work, and its length in seconds."""
    first, last = edges(prompts)
    seconds = passed(points, last) - passed(points, first)
    return (last - first) / seconds, seconds


def test_throughput_agrees_with_vllm_bench_serve(server: Server, prompts: list[Prompt], tmp_path: Path) -> None:
    rows, pairs, spans = [], [], []
    for repeat in range(REPEATS):
        points: dict[str, Points] = {}
        for who in ("ours", "theirs") if repeat % 2 == 0 else ("theirs", "ours"):
            if who == "ours":
                points[who] = ours(server, prompts)
            else:
                points[who], result = theirs(server, prompts, tmp_path)
        (our_rate, our_s), (their_rate, their_s) = (rate(points[who], prompts) for who in ("ours", "theirs"))
        # The same tokens as the other client saw them arrive, over the same span of work.
        seen_rate, _ = rate(result.token_times, prompts)
        counted = points["theirs"][-1][1]
        pairs.append(our_rate / their_rate - 1)
        spans += [our_s, their_s]
        rows.append(
            f"| {repeat + 1} | {our_rate:.1f} | {their_rate:.1f} | {pairs[-1]:+.2%} | {our_s:.0f} / {their_s:.0f} "
            f"| {counted:,.0f} | {result.output_tokens:,} | {counted / result.output_tokens - 1:+.3%} "
            f"| {their_rate / seen_rate - 1:+.2%} | {result.output_tokens_per_s:.1f} |"
        )
        assert abs(counted / result.output_tokens - 1) <= COUNTER_LIMIT, rows[-1]
        assert abs(their_rate / seen_rate - 1) <= COUNTER_LIMIT, rows[-1]
    mean, spread = statistics.fmean(pairs), statistics.stdev(pairs)
    print(table(server, prompts, rows, mean, spread))
    assert min(spans) >= 60 or SPAN_S < 60
    assert max(map(abs, pairs)) <= PAIR_LIMIT
    assert abs(mean) <= MEAN_LIMIT


def table(server: Server, prompts: list[Prompt], rows: list[str], mean: float, spread: float) -> str:
    first, last = edges(prompts)
    return "\n".join(
        [
            "",
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, autotune {autotune.__version__}, "
            f"vLLM {server.session.versions.get('vllm')}, {os.cpu_count()} cores, "
            f"load average {os.getloadavg()[0]:.1f}",
            f"SmolLM2-135M, eager; {len(prompts)} questions, forced lengths {SHORTEST}-{LONGEST}, {CONCURRENCY} in "
            f"flight, streamed; output tokens/s by the server's counter from token {first:,.0f} to {last:,.0f}",
            "",
            "| pair | our driver | vllm bench serve | difference | spans, s | counter, tokens | bench, tokens "
            "| counter - bench | counter - its chunks | bench, whole run |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *rows,
            "",
            f"mean difference {mean:+.2%} (limit {MEAN_LIMIT:.0%}), spread of the {len(rows)} pairs {spread:.2%}, "
            f"limit of each pair {PAIR_LIMIT:.0%}",
        ]
    )
