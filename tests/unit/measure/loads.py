"""Loads made up for the tests: a small closed loop over a step model, and the replay of a table."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Mapping, Sequence

from autotune.records.observation import (
    Capacity,
    ClientStats,
    Observation,
    RequestError,
    RequestOutcome,
    Sample,
    StopRule,
)

CLIENT = ClientStats(cpu_s=0.5, loop_lag_p99_s=0.004, in_flight_min=8, in_flight_max=8)
CAPACITY = Capacity(kv_tokens=100_000, engines=1, max_model_len=8192, max_num_seqs=256, source="log")


@dataclasses.dataclass(kw_only=True)
class Server:
    """A server with additive step times; the truth of the tests."""

    step_s: float = 0.010
    per_sequence_s: float = 1e-4
    per_kv_token_s: float = 0.0
    kv_tokens: int = 10**9
    max_num_seqs: int = 10**6
    prompt: int = 100
    hit_share: float = 0.0
    noise: float = 0.0


def closed_loop(
    server: Server,
    lengths: Sequence[int],
    *,
    n: int,
    until_s: float,
    ages: Sequence[int] = (),
    limit: int | None = None,
    seed: int = 0,
) -> Observation:
    """Answers of ``lengths`` tokens, ``n`` in flight, first send at 0; sampled once a second.

    ``ages``: tokens that the first ``n`` have behind them already (a stationary start).
    ``limit``: answers are cut at so many tokens.
    """
    rng = random.Random(seed)
    queue = list(range(n, len(lengths)))
    sent, ended, left = [0.0] * n, dict[int, float](), {}
    age = {i: (ages[i] if ages else 0) for i in range(n)}
    for i in range(n):
        left[i] = max(1, lengths[i] - age[i])
    running: list[int] = []
    waiting = list(range(n))
    t, tokens, prompts, preemptions, samples, due = 0.0, 0, 0, 0, [], 0.0
    while t < until_s and (running or waiting):
        kv = sum(server.prompt + age[i] for i in running)
        while waiting and len(running) < server.max_num_seqs:
            needed = server.prompt + age[waiting[0]]
            if kv + needed > server.kv_tokens:
                break
            i = waiting.pop(0)
            running.append(i)
            kv, prompts = kv + needed, prompts + needed
        while kv + len(running) > server.kv_tokens:
            i = running.pop()
            waiting.insert(0, i)
            kv, preemptions = kv - server.prompt - age[i], preemptions + 1
        b = len(running)
        step = server.step_s + server.per_sequence_s * b + server.per_kv_token_s * kv
        t += step * (1 + rng.gauss(0, server.noise))
        tokens += b
        for i in list(running):
            age[i] += 1
            left[i] -= 1
            if left[i] <= 0:
                running.remove(i)
                ended[i] = t
                if queue:
                    j = queue.pop(0)
                    sent.append(t)
                    age[j], left[j] = 0, lengths[j]
                    waiting.append(j)
        if t >= due:
            samples.append(
                Sample(
                    t_s=t,
                    running=len(running),
                    waiting=len(waiting),
                    kv_usage=min(1.0, kv / server.kv_tokens),
                    generation_tokens=tokens,
                    prompt_tokens=prompts,
                    preemptions=preemptions,
                    prefix_queries=prompts,
                    prefix_hits=int(prompts * server.hit_share),
                )
            )
            due += 1.0
    requests = tuple(
        RequestOutcome(
            id=f"r{i}",
            sent_s=sent[i],
            ended_s=ended.get(i),
            prompt_tokens=server.prompt,
            output_tokens=lengths[i] if i in ended else None,
            finish_reason=("length" if limit is not None and lengths[i] >= limit else "stop") if i in ended else None,
        )
        for i in range(len(sent))
    )
    return Observation(
        t_s=t,
        concurrency=n,
        samples=tuple(samples),
        requests=requests,
        client=dataclasses.replace(CLIENT, in_flight_min=n, in_flight_max=n),
        end="drained" if len(ended) == len(lengths) else "limit",
    )


def so_far(observation: Observation, t_s: float) -> Observation:
    """The same load as it was known at one time."""
    requests = [
        r
        if r.ended_s is not None and r.ended_s <= t_s
        else dataclasses.replace(r, ended_s=None, output_tokens=None, finish_reason=None, error=None)
        for r in observation.requests
        if r.sent_s <= t_s
    ]
    samples = tuple(s for s in observation.samples if s.t_s <= t_s)
    return dataclasses.replace(
        observation, t_s=t_s, samples=samples, requests=tuple(requests), end="running", failure=None
    )


def ended_by(rule: StopRule, observation: Observation) -> Observation:
    """The load cut where the rule would have ended it, asked at every sample; else the whole load."""
    for sample in observation.samples:
        seen = so_far(observation, sample.t_s)
        reason = rule(seen)
        if reason is not None:
            return dataclasses.replace(seen, end=f"stopped:{reason}")
    return observation


def lognormal(n: int, mean: float, sigma: float, seed: int = 0, most: int = 10**9) -> list[int]:
    """Lengths with this mean, mixed."""
    rng = random.Random(seed)
    scale = mean / pow(2.718281828, sigma * sigma / 2)
    return [min(most, max(1, int(rng.lognormvariate(0.0, sigma) * scale))) for _ in range(n)]


def with_samples(observation: Observation, samples: Iterable[Sample]) -> Observation:
    """The same load with other readings of the server."""
    return dataclasses.replace(observation, samples=tuple(samples))


def failing(observation: Observation, ids: Iterable[str], kind: str = "server") -> Observation:
    """The same load with some answers turned into errors."""
    wanted = set(ids)
    requests = tuple(
        dataclasses.replace(
            r,
            output_tokens=None,
            finish_reason=None,
            error=RequestError(kind=kind, message="500: broken"),
        )
        if r.id in wanted
        else r
        for r in observation.requests
    )
    return dataclasses.replace(observation, requests=requests)


def replay(rows: Sequence[Mapping[str, str]], *, until_s: float | None = None) -> Observation:
    """A table of stats lines as the load of a client that sent all its requests at once, with no refill."""
    n = int(rows[0]["running"]) + int(rows[0]["waiting"])
    tokens, samples, ends, last = 0.0, [], list[float](), 0.0
    for row in rows:
        t = float(row["t_s"])
        tokens += float(row["gen_tps"]) * (t - last)
        ends += [t] * int(row["http200_before_this_line"])
        samples.append(
            Sample(
                t_s=t,
                running=int(row["running"]),
                waiting=int(row["waiting"]),
                kv_usage=float(row["kv_pct"]) / 100,
                generation_tokens=int(tokens),
                prompt_tokens=None,
                preemptions=None,
                prefix_queries=None,
                prefix_hits=None,
            )
        )
        last = t
    requests = tuple(
        RequestOutcome(
            id=f"q{i}",
            sent_s=0.0,
            ended_s=ends[i] if i < len(ends) else None,
            prompt_tokens=100,
            output_tokens=None,
            finish_reason="stop" if i < len(ends) else None,
        )
        for i in range(n)
    )
    whole = Observation(
        t_s=last,
        concurrency=n,
        samples=tuple(samples),
        requests=requests,
        client=dataclasses.replace(CLIENT, in_flight_min=n, in_flight_max=n),
        end="drained",
    )
    return whole if until_s is None else so_far(whole, until_s)
