"""Validity before value: the reasons why a reading must not be used, whatever it says.

Each reason starts with one word that does not change (``in_flight_short``), then gives the figure and
the limit it broke.
"""

from __future__ import annotations

from collections.abc import Mapping

from autotune.measure.facts import Facts, ended_well
from autotune.measure.window import Counter
from autotune.records.observation import ClientStats, Observation

HELD_TOLERANCE = 0.03
"""The server must hold the concurrency within this share (and half a request): throughput rises at most
in proportion to what is in flight, so a shortage of 3 % costs at most 3 %, and a win under 3 % is none."""

TURNAROUND_S, TURNAROUND_SHARE = 1.0, 0.25
"""From an end to the first step of its replacement an answer is nowhere in the engine: HTTP, tokeniser, the
step under way (0.3-0.45 s on a busy host with 2 cores). That is the server's own time, so this much for each
end, at most a quarter of the concurrency, is no fault of the load. A client that holds back is missed only
where answers are short; the bottleneck still names the server's front end."""

CPU_LIMIT = 0.8
"""CPU seconds of the client per second of load. One thread does the work: near one core it is the limit
(Locust warns from 0.9; at 0.42 all of 800 streams were still read with 30 ms of lag)."""

LAG_FLOOR_S, LAG_CEILING_S, LAG_SHARE = 0.05, 0.5, 0.1
"""An end that is read late is replaced late: what is in flight falls by the mean lateness over the life of
an answer. The 99th percentile is many times the mean, so a tenth of a life there is under 1 %. Below 0.05 s
it never matters (a good client has 0.03 s at 800 streams), over 0.5 s, half a sample, it always does."""

GAP_SHARE = 0.25
"""Longest gap between readings as a share of the window: a longer one hides a stop of the server."""

FEWEST_SAMPLES = 8
"""Four batches of two readings each: fewer give no interval."""

LOCK_STEP, LOCK_STEP_LIVES = 0.8, 10.0
"""Phases more alike than this march together. Then the window holds whole and broken rounds, wrong by up
to one part of a round (4 % seen at a few rounds): no matter from ten rounds on."""

HIT_TOLERANCE = 0.10
"""More prefix-cache hits than the shared prompt explains; prefill is under a tenth of the work of long
answers, so less than this moves the rate by under 1 %."""


def invalid_reasons(
    observation: Observation,
    facts: Facts | None,
    counter: Counter,
    *,
    planned: Mapping[str, int] | None = None,
    expected_hit_share: float | None = None,
) -> tuple[str, ...]:
    """All reasons against one load; empty: it counts.

    Args:
        facts: Of the window; ``None``: there is none, and only what concerns the whole load is checked.
        planned: Tokens asked for by request id, where lengths are forced.
        expected_hit_share: Prefix-cache hits that the shared prompt explains, 0..1; ``None``: not checked.
    """
    reasons: list[str | None] = [
        _reset(counter),
        _client_error(observation),
        _lengths(observation, planned) if planned is not None else None,
    ]
    if facts is not None:
        server = counter.source == "server"
        reasons += [
            _held(observation, facts),
            _client(observation.client, observation.t_s, facts.mean_life_s),
            _gap(facts) if server else None,
            _few(facts) if server else None,
            _lock_step(facts),
            _reuse(facts, expected_hit_share),
        ]
    return tuple(reason for reason in reasons if reason is not None)


def client_limit(client: ClientStats, load_s: float, life_s: float | None) -> str | None:
    """Why the load generator was the limit, in words; ``None``: it was not."""
    used = client.cpu_s / load_s if load_s > 0 else 0.0
    if used > CPU_LIMIT:
        return f"the client used {used:.2f} of a core (limit {CPU_LIMIT})"
    limit = min(LAG_CEILING_S, max(LAG_FLOOR_S, LAG_SHARE * (life_s or 0.0)))
    if client.loop_lag_p99_s > limit:
        return f"the client's event loop was {client.loop_lag_p99_s:.3f} s late (99th percentile, limit {limit:.3f} s)"
    return None


def _reset(counter: Counter) -> str | None:
    return "counters_reset: the server's token counter went backwards" if counter.reset else None


def _client_error(observation: Observation) -> str | None:
    if observation.end != "stopped:client_error":
        return None
    line = observation.failure.line if observation.failure is not None else "4xx"
    return f"client_error: the server refused the first request: {line}"


def _held(observation: Observation, facts: Facts) -> str | None:
    """What the server says it holds against what was meant to be in flight."""
    held, n = facts.held_mean, observation.concurrency
    if held is None:
        return None
    slack = max(0.5, HELD_TOLERANCE * n)
    ends_per_s = facts.ended / facts.seconds if facts.seconds > 0 else 0.0
    if held < n - slack - min(TURNAROUND_S * ends_per_s, TURNAROUND_SHARE * n):
        return f"in_flight_short: the server held {held:.1f} of {n} requests"
    if held > n + slack:
        return f"foreign_load: the server held {held:.1f} requests, {n} are ours"
    return None


def _client(client: ClientStats, load_s: float, life_s: float | None) -> str | None:
    limit = client_limit(client, load_s, life_s)
    return None if limit is None else f"client_late: {limit}"


def _gap(facts: Facts) -> str | None:
    if facts.longest_gap_s <= GAP_SHARE * facts.seconds:
        return None
    return f"metrics_missing: {facts.longest_gap_s:.1f} s of {facts.seconds:.1f} s without a reading"


def _few(facts: Facts) -> str | None:
    if facts.samples >= FEWEST_SAMPLES:
        return None
    return f"few_samples: {facts.samples} readings in the window, {FEWEST_SAMPLES} are needed"


def _lock_step(facts: Facts) -> str | None:
    if facts.lock_step is None or facts.mean_life_s is None or facts.lock_step <= LOCK_STEP:
        return None
    lives = facts.seconds / facts.mean_life_s
    if lives >= LOCK_STEP_LIVES:
        return None
    return f"lock_step: answers of equal length march together (phase {facts.lock_step:.2f}, {lives:.1f} rounds)"


def _reuse(facts: Facts, expected: float | None) -> str | None:
    share = facts.prefix_hit_share
    # A preempted request finds its own blocks again: those hits are no reuse between requests.
    if expected is None or share is None or facts.preemptions or share <= expected + HIT_TOLERANCE:
        return None
    return f"prefix_reuse: {share:.0%} of the prompt tokens came from the prefix cache, {expected:.0%} expected"


def _lengths(observation: Observation, planned: Mapping[str, int]) -> str | None:
    ended = [r for r in ended_well(observation) if r.output_tokens is not None]
    off = [r for r in ended if r.id in planned and r.output_tokens != planned[r.id]]
    if not off:
        return None
    first = off[0]
    return (
        f"lengths_off: {len(off)} of {len(ended)} answers do not have the length asked for "
        f"({first.id}: {first.output_tokens} tokens, {planned[first.id]} asked for)"
    )
