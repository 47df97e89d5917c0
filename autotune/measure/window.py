"""Which part of a load is its steady window, and when a load may end: a pure stop rule.

A load from a fresh start shows 60-110 % too much for its first minutes, because every answer is young:
the window opens only when the mix of ages has turned over. A load from a stationary start has the right
mix from the beginning: its window opens when the prefill burst is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from autotune.measure.rate import Floats, Rate, rate_of
from autotune.records.observation import Observation, Sample
from autotune.records.trial import MeasureSpec

Start = Literal["fresh", "stationary"]

FIRST_WAVE_SHARE = 0.10
"""A fresh start has turned over when at most this share of its first requests still runs. Simulated with
measured H200 step times, lengths lognormal(0.8), 20-s windows: 5 % too fast at a mean of 1,000 tokens, 8 %
at 4,000, where one plain turnover leaves 7 and 12 %; a twentieth instead of a tenth gains 0-2 points for a
third to a half as long again. A fresh start of long answers stays biased: that is what the other start is for."""

BURST_LIMIT_S, POUR_S = 60.0, 10.0
"""What waits after so long is a queue, and the window opens over it (the burst of simulated H200 loads at 72 % KV
took 20-33 s, at most 98 s), unless it is known how many prompt tokens the burst has and they still come in."""

SETTLED_CHANGE = 0.05
"""Halves of a window that differ by less have settled (2.5-s stretches of steady H200 loads differ by 1-4 %)."""

DRAIN_S = 6.0
"""Fewer in flight for so long is the drain; for less it may be a lane that waits after a failed request."""


@dataclass(frozen=True, kw_only=True)
class Counter:
    """Tokens generated so far, as a step of times and counts of equal length."""

    times: Floats
    """Seconds since the first send."""
    tokens: Floats
    source: Literal["server", "client"]
    """``client``: the server showed no counters; tokens of each answer counted when it ended."""
    reset: bool
    """The server's counter went backwards: it was restarted under the load."""

    def rate(self, start_s: float, end_s: float) -> Rate | None:
        """The rate between two times, from the readings inside them."""
        inside = (self.times >= start_s) & (self.times <= end_s)
        return rate_of(self.times[inside], self.tokens[inside])


@dataclass(frozen=True, kw_only=True)
class Window:
    """A span of full load with its rate."""

    start_s: float
    end_s: float
    rate: Rate
    source: Literal["server", "client"]

    @property
    def seconds(self) -> float:
        """Length."""
        return self.end_s - self.start_s

    def narrow(self, share: float) -> bool:
        """Whether the half-width of the interval is under this share of the rate."""
        half = self.rate.half_width
        return half is not None and half <= share * self.rate.per_s


@dataclass(frozen=True)
class View:
    """One observation (so far), read as a load: what has ended, when it drained, what it counted."""

    observation: Observation
    slots: int | None = None
    """Requests that the server works on at once; ``None``: all that are in flight."""
    burst_tokens: int | None = None
    """Prompt tokens of a stationary start's burst; ``None``: not known."""

    @cached_property
    def counter(self) -> Counter:
        """The server's token counter; the client's own count where the server never showed one."""
        read = [(s.t_s, s.generation_tokens) for s in self.observation.samples]
        known = [(t, tokens) for t, tokens in read if tokens is not None]
        if len(known) >= 2:
            times, tokens = np.array(known, dtype=np.float64).T
            reset = bool((np.diff(tokens) < 0).any())
            return Counter(times=times, tokens=tokens, source="server", reset=reset)
        ended = sorted(
            (r.ended_s, r.output_tokens)
            for r in self.observation.requests
            if r.ended_s is not None and r.output_tokens is not None and r.error is None
        )
        times = np.array([0.0, *(t for t, _ in ended)])
        tokens = np.cumsum([0.0, *(float(n) for _, n in ended)])
        return Counter(times=times, tokens=tokens, source="client", reset=False)

    @cached_property
    def ended(self) -> list[float]:
        """When requests ended, failed ones too, in order."""
        return sorted(r.ended_s for r in self.observation.requests if r.ended_s is not None)

    @property
    def failed(self) -> int:
        """Requests that ended in an error."""
        return sum(r.error is not None for r in self.observation.requests)

    @property
    def full_until_s(self) -> float:
        """The first end that nothing replaced: from here on the load drains."""
        replaced = len(self.observation.requests) - self.observation.concurrency
        return self.ended[replaced] if 0 <= replaced < len(self.ended) else self.observation.t_s

    @property
    def turned_over_s(self) -> float | None:
        """When the mix of ages was no longer that of a fresh start; ``None``: not yet.

        As many answers as are in flight have ended well, and nine of ten of the first wave.
        """
        n = self.observation.concurrency
        well = sorted(r.ended_s for r in self.observation.requests if r.ended_s is not None and r.error is None)
        first = sorted(self.observation.requests, key=lambda r: r.sent_s)[:n]
        wave = sorted(r.ended_s for r in first if r.ended_s is not None)
        needed = n - int(FIRST_WAVE_SHARE * n)
        if len(well) < n or len(wave) < needed:
            return None
        return max(well[n - 1], wave[needed - 1])

    @property
    def burst_over_s(self) -> float | None:
        """When the prefill burst of a stationary start was over; ``None``: not yet.

        All run that can (and none waits, if that is all of them), and the rate from here on is above half of its
        later median. After ``BURST_LIMIT_S`` what waits is a queue, unless the burst is known not to be over and its
        prompts still come in.
        """
        n = self.observation.concurrency
        slots = n if self.slots is None else min(self.slots, n)
        times, tokens = self.counter.times, self.counter.tokens
        for sample in self.observation.samples:
            if sample.t_s > BURST_LIMIT_S and not self._prompts_pour_in(sample.t_s):
                return sample.t_s
            if sample.running is None or sample.running < slots or (slots == n and sample.waiting != 0):
                continue
            inside = times >= sample.t_s
            rates = np.diff(tokens[inside]) / np.diff(times[inside])
            if len(rates) and rates[0] > 0.5 * float(np.median(rates)):
                return sample.t_s
        return None

    def _prompts_pour_in(self, t_s: float) -> bool:
        """Whether the burst's prompts are not all computed, and the last ten seconds' came as fast as before."""
        read = [(s.t_s, s.prompt_tokens) for s in self.observation.samples if s.prompt_tokens is not None]
        if self.burst_tokens is None or len(read) < 2:
            return False
        times, tokens = np.array(read, dtype=np.float64).T
        done, before = np.interp([t_s, t_s - POUR_S], times, tokens - tokens[0])
        return bool(done < 0.95 * self.burst_tokens and done - before > 0.5 * done * POUR_S / t_s)

    def opening_s(self, start: Start) -> float | None:
        """From when on a window may open; ``None``: not yet."""
        opening = self.turned_over_s if start == "fresh" else self.burst_over_s
        return None if opening is None or opening >= self.full_until_s else opening

    def window(self, spec: MeasureSpec, start: Start) -> Window | None:
        """The earliest settled window; ``None`` while there is none.

        Settled: the rates of the two halves differ by under 5 %, or by no more than chance and under the
        drift limit. Where the earliest span has not settled its start moves on, reading by reading, as
        long as the shortest window is left.
        """
        opening = self.opening_s(start)
        if opening is None:
            return None
        counter, last = self.counter, min(self.full_until_s, self.observation.t_s)
        inside = counter.times[(counter.times >= opening) & (counter.times <= last)]
        for begin in inside[inside <= last - spec.window_s]:
            end = float(inside[inside <= begin + spec.window_limit_s][-1])
            rate = counter.rate(begin, end)
            if rate is not None and end - begin >= 0.9 * spec.window_s and _settled(rate, spec.drift_limit):
                return Window(start_s=float(begin), end_s=end, rate=rate, source=counter.source)
        return None

    def saturated_span(
        self, spec: MeasureSpec, since_s: float = 0.0, until_s: float | None = None
    ) -> tuple[float, float] | None:
        """The ``window_s`` seconds up to a time (now), if KV was full or requests were preempted all along.

        All along: mean KV use at its limit, or preemptions in both halves.
        """
        until = self.observation.t_s if until_s is None else until_s
        samples = [s for s in self.observation.samples if until - 1.5 * spec.window_s <= s.t_s <= until]
        if not samples or (begin := samples[-1].t_s - spec.window_s) < since_s:
            return None
        span = [s for s in samples if s.t_s >= begin]
        usage = [s.kv_usage for s in span if s.kv_usage is not None]
        full = bool(usage) and sum(usage) / len(usage) >= spec.kv_limit
        half = len(span) // 2
        preempting = _rises(span[: half + 1]) and _rises(span[half:])
        return (begin, samples[-1].t_s) if full or preempting else None

    def ever_saturated(self, spec: MeasureSpec) -> bool:
        """Whether any ``window_s`` seconds of the load were saturated."""
        return any(self.saturated_span(spec, until_s=s.t_s) is not None for s in reversed(self.observation.samples))


def _rises(samples: list[Sample]) -> bool:
    counts = [s.preemptions for s in samples if s.preemptions is not None]
    return len(counts) >= 2 and counts[-1] > counts[0]


def _settled(rate: Rate, drift_limit: float) -> bool:
    change = abs(rate.change)
    by_chance = rate.change_noise is not None and change <= rate.change_noise
    return rate.per_s > 0 and (change <= SETTLED_CHANGE or (by_chance and change <= drift_limit))


@dataclass(frozen=True)
class SteadyWindow:
    """Stop rule: ends a load as soon as its window is good enough, or can no longer become so.

    Reasons: ``steady`` (interval narrow enough), ``window_limit``, ``ran_out`` (no request is left to
    replace an end, so the window cannot grow), ``saturated``, ``not_settled``, ``counters_reset``,
    ``failing``.
    """

    spec: MeasureSpec
    expected_output_tokens: float | None = None
    """Mean answer. With it a load is given up as soon as it is clear that it cannot turn over in time."""
    start: Start = "fresh"
    slots: int | None = None
    """Requests that the server works on at once; ``None``: all that are in flight."""
    burst_tokens: int | None = None
    """Prompt tokens of a stationary start's burst; ``None``: not known."""

    def __call__(self, so_far: Observation) -> str | None:
        """A reason to end the load, or ``None``."""
        view = View(so_far, self.slots, self.burst_tokens)
        if view.counter.reset:
            return "counters_reset"
        # More failures than lanes, and than answers: what comes is no measurement of this setting.
        if view.failed > max(so_far.concurrency, len(view.ended) // 2):
            return "failing"
        window = view.window(self.spec, self.start)
        if window is not None and window.narrow(self.spec.interval):
            return "steady"
        if window is not None and window.seconds >= self.spec.window_limit_s - 1.5 * self._pace(so_far):
            return "window_limit"
        if window is not None and so_far.t_s > view.full_until_s + DRAIN_S:
            return "ran_out"
        opening = view.opening_s(self.start)
        # Before the turnover a full cache may come from the answers' common age: that passes.
        since = 0.0 if opening is None else opening
        due = opening is not None or so_far.t_s >= self.spec.settle_limit_s
        if due and view.saturated_span(self.spec, since) is not None:
            return "saturated"
        if window is None and self._hopeless(view, opening):
            return "not_settled"
        return None

    def _hopeless(self, view: View, opening: float | None) -> bool:
        t_s = view.observation.t_s
        if opening is not None:
            return t_s >= max(self.spec.settle_limit_s, opening + self.spec.window_limit_s)
        if t_s >= self.spec.settle_limit_s:
            return True
        if self.start == "stationary" or self.expected_output_tokens is None or t_s < self.spec.window_s:
            return False
        # The early rate flatters, so this time is too short rather than too long; half as much again for
        # an expectation that is wrong.
        rate = view.counter.rate(0.0, t_s)
        turnover = view.observation.concurrency * self.expected_output_tokens
        if rate is None or view.counter.source == "client":
            return False
        return rate.per_s * self.spec.settle_limit_s * 1.5 < turnover

    @staticmethod
    def _pace(so_far: Observation) -> float:
        """Seconds between samples."""
        n = len(so_far.samples)
        return so_far.t_s / n if n else 0.0
