"""Is a setting stable under this load: pure rules, each a dimensionless violation (at most 0 is fine).

Every load gets the same set of rules, so that a sampler can learn from any of them. A violation is
``value / limit - 1``, or the value itself where the limit is 0. What is not known violates nothing.
"""

from __future__ import annotations

from autotune.measure.facts import Facts, ended_well
from autotune.measure.window import Window
from autotune.records.measurement import Latency
from autotune.records.observation import Observation
from autotune.records.trial import MeasureSpec


def violations(
    observation: Observation,
    spec: MeasureSpec,
    facts: Facts,
    window: Window | None,
    latency: Latency | None,
    *,
    truncated: float | None,
    answer_tokens: float | None,
) -> dict[str, float]:
    """All rules: ``failed_requests, engine, stall, preemptions, kv, drift, truncation, ttft, tpot``.

    Args:
        facts: Of the window, or of the whole load where there is none.
        window: The steady window; without one the rate never settled, which is a drift of its own.
        latency: Of the streamed answers; ``None``: nothing was streamed.
        truncated: Share of the answers that the output limit cuts; ``None``: not known.
        answer_tokens: Mean answer, tokens; ``None``: not known.
    """
    return {
        "failed_requests": _over(_failed_share(observation), spec.failed_limit),
        "engine": 1.0 if observation.end == "engine_died" else 0.0,
        "stall": 1.0 if observation.end == "stalled" else _over(_silence(observation), spec.stall_s),
        "preemptions": _over(_preemptions_per_answer(facts, answer_tokens), spec.preemption_limit),
        "kv": _over(facts.kv_max, spec.kv_limit),
        "drift": 1.0 if window is None else _over(abs(window.rate.change), spec.drift_limit),
        "truncation": _over(truncated, spec.truncation_limit),
        "ttft": _over(None if latency is None else latency.ttft_p99_s, spec.max_ttft_s),
        "tpot": _over(None if latency is None else latency.tpot_p99_s, spec.max_tpot_s),
    }


def truncated_share(observation: Observation) -> float | None:
    """Answers cut at the output limit, of those that ended well; ``None``: none ended."""
    ended = ended_well(observation)
    return sum(r.finish_reason == "length" for r in ended) / len(ended) if ended else None


def _over(value: float | None, limit: float | None) -> float:
    if value is None or limit is None:
        return 0.0
    return value / limit - 1.0 if limit > 0 else value


def _failed_share(observation: Observation) -> float | None:
    ended = [r for r in observation.requests if r.ended_s is not None]
    return sum(r.error is not None for r in ended) / len(ended) if ended else None


def _preemptions_per_answer(facts: Facts, answer_tokens: float | None) -> float | None:
    """Preemptions in the span per answer's worth of tokens written in it.

    Long answers seldom end inside a short window, so answers are counted by their tokens where the mean
    length is known (of those that ended it is biased low, so the rule is the milder for it).
    """
    if facts.preemptions is None:
        return None
    answers = float(facts.ended)
    if answer_tokens and facts.generated is not None:
        answers = max(answers, facts.generated / answer_tokens)
    return facts.preemptions / max(answers, 1.0)


def _silence(observation: Observation) -> float | None:
    """Longest time, seconds, in which the server held requests and counted no token."""
    longest, since, last = 0.0, 0.0, None
    for sample in observation.samples:
        if sample.generation_tokens is None:
            continue
        held = (sample.running or 0) + (sample.waiting or 0)
        if sample.generation_tokens != last or not held:
            since, last = sample.t_s, sample.generation_tokens
        longest = max(longest, sample.t_s - since)
    return longest if last is not None else None
