"""What one span of a load showed, in plain numbers: the evidence of every verdict."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autotune.measure.stationary import StationaryLoad
from autotune.records.measurement import Latency
from autotune.records.observation import Observation, RequestOutcome, Sample


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Means and differences over one span; ``None`` where the server did not say."""

    start_s: float
    end_s: float
    samples: int
    """Readings of the server inside the span."""
    longest_gap_s: float
    """Longest time without a reading, edges included."""
    kv_mean: float | None
    kv_max: float | None
    running_mean: float | None
    waiting_mean: float | None
    preemptions: int | None
    generated: int | None
    """Tokens by the server's counter."""
    prompt_tokens_per_s: float | None
    peak_prompt_tokens_per_s: float | None
    """Highest between two readings of the whole load: what prefill alone can do, or less."""
    prefix_hit_share: float | None
    ended: int
    """Answers that ended well inside the span."""
    mean_life_s: float | None
    """Of a whole answer: from send to end, of those that ended; of a stationary load its mean length at the pace
    of the span, since the first ones are sent when part of them is written."""
    lock_step: float | None
    """0: the ages of the requests in flight are spread evenly over a life; 1: they march together."""

    @property
    def seconds(self) -> float:
        """Length of the span."""
        return self.end_s - self.start_s

    @property
    def held_mean(self) -> float | None:
        """Requests that the server holds, running and waiting."""
        if self.running_mean is None or self.waiting_mean is None:
            return None
        return self.running_mean + self.waiting_mean


def facts_of(observation: Observation, start_s: float, end_s: float, stationary: StationaryLoad | None = None) -> Facts:
    """The facts of one span; ``stationary``: the load that started in its steady state."""
    inside = [s for s in observation.samples if start_s <= s.t_s <= end_s]
    ended = [r for r in ended_well(observation) if start_s <= (r.ended_s or 0.0) <= end_s]
    lives = [(r.ended_s or 0.0) - r.sent_s for r in ended]
    running = _mean([float(s.running) for s in inside if s.running is not None])
    generated = _difference(inside, "generation_tokens")
    usage = [s.kv_usage for s in inside if s.kv_usage is not None]
    edges = [start_s, *(s.t_s for s in inside), end_s]
    prompts = _difference(inside, "prompt_tokens")
    queries, hits = _difference(inside, "prefix_queries"), _difference(inside, "prefix_hits")
    seconds = inside[-1].t_s - inside[0].t_s if inside else 0.0
    life, written_s = _mean(lives), dict[str, float]()
    if stationary is not None and generated and running and seconds > 0:
        pace = generated / seconds / running
        life = stationary.long_run.answer_tokens / pace
        written_s = {request.id: request.context_tokens / pace for request in stationary.start}
    return Facts(
        start_s=start_s,
        end_s=end_s,
        samples=len(inside),
        longest_gap_s=max(b - a for a, b in itertools.pairwise(edges)),
        kv_mean=_mean(usage),
        kv_max=max(usage, default=None),
        running_mean=running,
        waiting_mean=_mean([float(s.waiting) for s in inside if s.waiting is not None]),
        preemptions=_difference(inside, "preemptions"),
        generated=generated,
        prompt_tokens_per_s=prompts / seconds if prompts is not None and seconds > 0 else None,
        peak_prompt_tokens_per_s=_peak(observation.samples),
        prefix_hit_share=hits / queries if hits is not None and queries else None,
        ended=len(ended),
        mean_life_s=life,
        lock_step=_lock_step(observation, start_s, end_s, life, written_s),
    )


def ended_well(observation: Observation) -> list[RequestOutcome]:
    """Requests that ended with an answer."""
    return [r for r in observation.requests if r.ended_s is not None and r.error is None]


def latency_of(observation: Observation, facts: Facts) -> Latency | None:
    """Quantiles over one span; ``None``: nothing was streamed, or nothing was written.

    Times to the first token are of requests sent inside the span, those that still wait for it counted with what
    they have waited where that is longer than all others (a stationary start's own requests carry their answer so
    far and meet the burst: they tell nothing). Times per token are of answers sent and ended inside; where answers
    are longer than the span, the pace of all streams stands for them, since they decode in the same steps.
    """
    start_s, end_s = facts.start_s, facts.end_s
    if not any(r.ttft_s is not None for r in observation.requests) or not facts.generated or not facts.running_mean:
        return None
    inside = [r for r in observation.requests if start_s <= r.sent_s <= end_s and r.error is None]
    first = [r.ttft_s for r in inside if r.ttft_s is not None]
    longest = max(first, default=0.0)
    waited = [observation.t_s - r.sent_s for r in inside if r.ttft_s is None and r.ended_s is None]
    first += [seconds for seconds in waited if seconds > longest]
    per_token = [
        (r.ended_s - r.sent_s - r.ttft_s) / (r.output_tokens - 1)
        for r in inside
        if r.ended_s is not None and r.ttft_s is not None and r.output_tokens is not None and r.output_tokens > 1
    ]
    pace_s = facts.seconds * facts.running_mean / facts.generated
    ttft = np.quantile(first, (0.5, 0.99)) if first else None
    tpot = np.quantile(per_token or [pace_s], (0.5, 0.99))
    return Latency(
        ttft_p50_s=None if ttft is None else float(ttft[0]),
        ttft_p99_s=None if ttft is None else float(ttft[1]),
        tpot_p50_s=float(tpot[0]),
        tpot_p99_s=float(tpot[1]),
    )


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _difference(samples: list[Sample], counter: str) -> int | None:
    """Last less first known value; a counter that goes backwards gives ``None``, never a negative."""
    known: list[int] = [value for s in samples if (value := getattr(s, counter)) is not None]
    if len(known) < 2 or known[-1] < known[0]:
        return None
    return known[-1] - known[0]


def _peak(samples: tuple[Sample, ...]) -> float | None:
    known = [(s.t_s, s.prompt_tokens) for s in samples if s.prompt_tokens is not None]
    rates = [(n - m) / (t - u) for (u, m), (t, n) in itertools.pairwise(known) if t > u]
    return max(rates, default=None)


def _lock_step(
    observation: Observation, start_s: float, end_s: float, life: float | None, written_s: Mapping[str, float]
) -> float | None:
    """Mean length of the resultant of the phases ``age / life``, at five times of the span (0..1).

    The resultant of n evenly spread phases is near 0 (about ``1/sqrt(n)`` by chance), that of answers of
    equal length that started together is 1. Under four in flight it means nothing: ``None``. ``written_s`` is
    the age with which a request was sent, by id.
    """
    if life is None or life <= 0 or observation.concurrency < 4:
        return None
    sent = np.array([r.sent_s - written_s.get(r.id, 0.0) for r in observation.requests])
    gone = np.array([math.inf if r.ended_s is None else r.ended_s for r in observation.requests])
    lengths = []
    for t in np.linspace(start_s, end_s, 5):
        ages = t - sent[(sent <= t) & (gone > t)]
        if len(ages):
            lengths.append(float(abs(np.exp(2j * np.pi * ages / life).mean())))
    return _mean(lengths)
