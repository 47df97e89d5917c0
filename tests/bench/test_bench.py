"""Our driver beside three other load generators on one null server: CPU, requests in flight, loop lag.

    make bench        or        AUTOTUNE_BENCH_IN_FLIGHT=256 python -m pytest -m bench tests/bench -s

The server decides the lengths of the answers (the same for all, mixed) and writes 5,000 tokens a second in all, one
event and one write each, so that a client that needs more CPU uses more of it instead of being slower.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.bench import meter, rivals
from tests.bench.rivals import Client, Load
from tests.bench.vllm_bench import Prompt
from tests.fakes.null import Null
from tests.real_vllm import cpu_vllm

pytestmark = [pytest.mark.bench, pytest.mark.timeout(3600)]

IN_FLIGHT = [int(n) for n in os.environ.get("AUTOTUNE_BENCH_IN_FLIGHT", "256,1024,2048").split(",")]
TOKENS_PER_S = 5000.0
SHORTEST, LONGEST = 32, 96
RAMP_S = 4.0
"""Long enough for the first wave to be there."""
IN_FLIGHT_LIMIT = 0.02
"""Ours alone: on one core with the server, a few answers end together and the next are sent a few ms later."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One client's figures."""

    client: Client
    run: meter.Run
    held: meter.InFlight
    loop_lag_s: float | None
    answers: int


def lengths() -> list[int]:
    draw = random.Random(4)
    return [draw.randint(SHORTEST, LONGEST) for _ in range(997)]


def measured(null: Null, client: Client, concurrency: int, folder: Path) -> Row:
    null.configure(token_s=concurrency / TOKENS_PER_S, lengths=lengths())
    requests = max(1500, 5 * concurrency // 2)
    prompts = [Prompt(text=f"Question {n}: why is the sky so blue today?", output_tokens=64) for n in range(requests)]
    load = Load(base_url=null.base_url, model="null-server", concurrency=concurrency, prompts=prompts, folder=folder)
    argv = client.argv(load)
    seconds = requests * (SHORTEST + LONGEST) / 2 / TOKENS_PER_S
    run = meter.run(argv, null.base_url, folder=folder, environment=client.environment(), timeout_s=180 + 5 * seconds)
    assert run.exit_code == 0, f"{client.name}: exit {run.exit_code}\n{run.output[-3000:]}"
    seen = null.seen()
    assert seen["ended"] == requests, f"{client.name} had {seen['ended']} answers of {requests}\n{run.output[-3000:]}"
    held = meter.in_flight(seen["in_flight"], concurrency, ramp_s=RAMP_S)
    own = json.loads(run.output.splitlines()[-1]) if client.name.startswith("autotune") else {}
    assert own.get("failed", 0) == 0
    return Row(client=client, run=run, held=held, loop_lag_s=own.get("loop_lag_p99_s"), answers=seen["ended"])


@pytest.mark.parametrize("concurrency", IN_FLIGHT)
def test_ours_needs_the_least_cpu(concurrency: int, tmp_path: Path) -> None:
    cpu_vllm.install()
    found = []
    null = Null()
    try:
        for number, client in enumerate(rivals.clients()):
            if client.version is None:
                print(f"{client.name} is not installed: python -m tests.bench.rivals")
                continue
            folder = tmp_path / str(number)
            folder.mkdir()
            found.append(measured(null, client, concurrency, folder))
    finally:
        null.close()
    print(table(found, concurrency))
    streamed, *others, whole = found
    assert others
    for other in others:
        assert streamed.run.cpu_s_per_million < other.run.cpu_s_per_million, other.client.name
    assert whole.run.cpu_s_per_million < streamed.run.cpu_s_per_million
    for mine in (streamed, whole):
        assert mine.held.mean_error <= IN_FLIGHT_LIMIT
        assert mine.held.most == concurrency


def table(rows: list[Row], concurrency: int) -> str:
    least = rows[0].run.cpu_s_per_million
    lines = []
    for row in rows:
        run, held = row.run, row.held
        lag = "not known" if row.loop_lag_s is None else f"{1000 * row.loop_lag_s:.0f} ms"
        lines.append(
            f"| {row.client.name} {row.client.version} | {run.cpu_s_per_million:.1f} "
            f"| {run.cpu_s_per_million / least:.2f} | {held.mean_error:.2%} | {held.fewest}-{held.most} | {lag} "
            f"| {run.tokens / run.load_s:,.0f} | {run.cpu_s:.0f} | {run.processes} | {row.answers:,} |"
        )
    return "\n".join(
        [
            "",
            f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}; "
            f"{concurrency} in flight, streamed unless said, {TOKENS_PER_S:,.0f} tokens/s asked of the server in all",
            "",
            "| client | CPU s per million tokens | of ours | in-flight error | in flight | loop lag p99 "
            "| tokens/s, whole load | CPU s, whole life | processes | answers |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *lines,
        ]
    )
