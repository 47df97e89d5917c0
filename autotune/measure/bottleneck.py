"""Names what limits the throughput of a load, with its evidence and the knob that would move it.

The rules go from what is certain to what is inferred, and the first that holds is the answer. Without
one that holds the answer is ``None``: no guess is printed as a finding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.measure.facts import Facts
from autotune.measure.validity import client_limit
from autotune.records.measurement import Bottleneck, Measurement
from autotune.records.observation import Capacity, Observation

QUEUE_SHARE = 0.02
"""Waiting requests, as a share of the concurrency (and at least half a one), that make a queue; less is
the moment between the arrival of a request and the next engine step."""

CAP_SHARE = 0.97
"""Running requests as a share of ``max_num_seqs`` that count as "at the limit": a request that ends
leaves its place empty for a step."""

MISSING_SHARE = 0.10
"""Requests in flight that the engine does not hold, as a share, from which on the front end is the limit:
less costs less than this, and something else costs more."""

PREFILL_SHARE = 0.5
"""Prompt tokens/s as a share of the highest rate of this load (the burst at its start) from which on the
engine spends most of its time on prompts."""

RISING = 0.15
"""Growth of the throughput as a power of the concurrency. Bound by bandwidth, a step reads the same
weights for more answers: near 1 at first, 0.28-0.53 measured between 64 and 224 in flight (32B on one and
two H200). Under 0.15 twice as many gain under 11 %. A plateau made by reading long contexts looks the same
from outside: telling it from arithmetic needs the step model."""

FAR_ENOUGH = 1.25
"""Least ratio of two concurrencies whose throughputs are compared: nearer ones differ by noise."""


def bottleneck_of(
    observation: Observation,
    facts: Facts,
    capacity: Capacity,
    *,
    kv_limit: float,
    rate: float | None,
    earlier: Sequence[Measurement] = (),
) -> Bottleneck | None:
    """What limits this load.

    Args:
        facts: Of the window, or of the last stretch of the load where there is none.
        kv_limit: KV use from which on the cache is full, 0..1.
        rate: Tokens/s of the window, where there is one.
        earlier: Other loads of the same server, to see whether more in flight still gains.
    """
    return (
        _client(observation, facts)
        or _kv_full(facts, kv_limit)
        or _sequences(observation, facts, capacity)
        or _server_cpu(observation, facts)
        or _prefill(observation, facts)
        or _hardware(observation.concurrency, rate, earlier)
    )


def bottleneck_in_sight(observation: Observation, facts: Facts, *, kv_limit: float) -> Bottleneck | None:
    """What limits, or soon will, a load that has no steady window; ``facts`` of the whole load."""
    return _client(observation, facts) or _kv_full(facts, kv_limit) or _kv_to_come(observation, kv_limit)


def _kv_to_come(observation: Observation, kv_limit: float) -> Bottleneck | None:
    """The KV cache, if at its pace it is full within as long again as the load took."""
    known = [(s.t_s, s.kv_usage) for s in observation.samples if s.kv_usage is not None]
    if len(known) < 4:
        return None
    (t0, first), (t1, last) = known[len(known) // 2], known[-1]
    slope = (last - first) / (t1 - t0) if t1 > t0 else 0.0
    if slope <= 0 or last + slope * observation.t_s < kv_limit:
        return None
    left = max(0.0, (kv_limit - last) / slope)
    return Bottleneck(
        kind="kv",
        evidence=f"KV use {last:.0%} and still rising: full in about {left:.0f} s at this pace",
        knob=_KV_KNOB,
    )


_KV_KNOB = "fewer in flight, or more KV cache: gpu_memory_utilization, tensor_parallel_size, kv_cache_dtype"


def _client(observation: Observation, facts: Facts) -> Bottleneck | None:
    limit = client_limit(observation.client, observation.t_s, facts.mean_life_s)
    if limit is None:
        return None
    return Bottleneck(kind="client", evidence=limit, knob="do not stream, or send from an idle machine")


def _kv_full(facts: Facts, kv_limit: float) -> Bottleneck | None:
    full = facts.kv_max is not None and facts.kv_max >= kv_limit
    if not full and not facts.preemptions:
        return None
    parts = []
    if facts.kv_max is not None:
        parts.append(f"KV use {facts.kv_max:.0%}")
    if facts.preemptions:
        parts.append(f"{facts.preemptions} preemptions in {facts.seconds:.0f} s")
    if facts.waiting_mean:
        parts.append(f"{facts.waiting_mean:.1f} waiting")
    return Bottleneck(kind="kv", evidence=", ".join(parts), knob=_KV_KNOB)


def _queued(observation: Observation, facts: Facts) -> bool:
    return facts.waiting_mean is not None and facts.waiting_mean >= max(0.5, QUEUE_SHARE * observation.concurrency)


def _sequences(observation: Observation, facts: Facts, capacity: Capacity) -> Bottleneck | None:
    if not _queued(observation, facts) or capacity.max_num_seqs is None or facts.running_mean is None:
        return None
    limit = capacity.max_num_seqs * capacity.engines
    if facts.running_mean < CAP_SHARE * limit - 0.5:
        return None
    return Bottleneck(
        kind="sequences",
        evidence=f"{facts.running_mean:.1f} running at a limit of {limit}, {facts.waiting_mean:.1f} waiting",
        knob="max_num_seqs",
    )


def _server_cpu(observation: Observation, facts: Facts) -> Bottleneck | None:
    """The client keeps N in flight and its loop is on time, yet the engine holds fewer: they are in the
    server's front end (HTTP, tokeniser, detokeniser)."""
    n, held = observation.concurrency, facts.held_mean
    if held is None or observation.client.in_flight_min < n or held > n - max(0.5, MISSING_SHARE * n):
        return None
    return Bottleneck(
        kind="server_cpu",
        evidence=f"{n} in flight, but the engine holds {held:.1f}: the rest is between answers, in the API server",
        knob="api_server_count, or more CPU cores for the server",
    )


def _prefill(observation: Observation, facts: Facts) -> Bottleneck | None:
    prompts, peak = facts.prompt_tokens_per_s, facts.peak_prompt_tokens_per_s
    generated = facts.generated / facts.seconds if facts.generated is not None and facts.seconds > 0 else None
    if prompts is None or generated is None:
        return None
    busy = peak is not None and prompts > PREFILL_SHARE * peak and prompts > generated
    if not busy and not _queued(observation, facts):
        return None
    queue = f", {facts.waiting_mean:.1f} waiting though sequences and KV are free" if not busy else ""
    return Bottleneck(
        kind="prefill",
        evidence=f"{prompts:.0f} prompt tokens/s beside {generated:.0f} output tokens/s{queue}",
        knob="max_num_batched_tokens",
    )


def _hardware(n: int, rate: float | None, earlier: Sequence[Measurement]) -> Bottleneck | None:
    """Bandwidth while more in flight still gains, compute when it does not: needs a second load."""
    steady = [m for m in earlier if m.outcome == "steady" and m.valid and m.output_tokens_per_s]
    below = max((m for m in steady if m.concurrency * FAR_ENOUGH <= n), key=lambda m: m.concurrency, default=None)
    if rate is None or rate <= 0 or below is None or below.output_tokens_per_s is None:
        return None
    gain = rate / below.output_tokens_per_s
    power = math.log(gain) / math.log(n / below.concurrency)
    evidence = f"{gain:.2f} times the throughput of {below.concurrency} in flight"
    if power >= RISING:
        return Bottleneck(kind="bandwidth", evidence=evidence, knob="more in flight, or tensor_parallel_size")
    return Bottleneck(kind="compute", evidence=evidence, knob="tensor_parallel_size or quantization")
