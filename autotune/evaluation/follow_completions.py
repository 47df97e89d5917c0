"""Forecast from the times at which answers ended and nothing else: a rate that wanders, so a wide interval.

Nothing is known of speed, lengths or load. The rate of ends swings (batches that reach a limit together,
preemption, a slow middle), so the rest of the run is taken to go on at a mean of rates seen over the run, each
as likely as another, and to end in a tail of the longest answers.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from autotune.errors import InputError
from autotune.physics.forecast import student_quantile

STRETCHES = 6
"""The time since the first end is cut into so many stretches, each with its rate."""
RATE_SD, RATE_SD_MOST = 0.30, 0.70
"""Spread of the rate from one such stretch to the next: at least, since few are seen, and at most."""
UNSEEN_SD = 0.35
"""Relative error that the unseen lengths add to the rest while nothing is done; it falls with the share that is
(whole runs: straight lines were wrong by +174 % at 2 % of the time, -36 % at 7 %, -8 % at 40 %)."""
TAIL = 1.0
"""The tail adds about the time that the first answer took: what is in flight last ends one by one."""
WHY = (
    "only the times of ends are known: not the answers' lengths, not how many run or wait, not the tokens",
    "the rate of ends may change: the interval is wide",
)


@dataclass(frozen=True, kw_only=True)
class CompletionsForecast:
    """Times in seconds from the first send."""

    elapsed_s: float
    forecast_s: float
    """Of the whole run."""
    low_s: float
    high_s: float
    done: bool
    limits: tuple[str, ...]


def forecast_completions(
    times_s: Sequence[float], counts: Sequence[float], *, requests: int, at_s: float | None = None
) -> CompletionsForecast:
    """How long the run will take.

    Args:
        times_s: ends of the bins, seconds from the first send.
        counts: answers that ended in each.
        at_s: look at the first seconds only.

    Raises:
        InputError: nothing ended by then, or more than there are requests.
    """
    seen = [(t, c) for t, c in zip(times_s, counts, strict=True) if at_s is None or t <= at_s + 1e-6]
    ended = sum(c for _, c in seen)
    if not seen or ended <= 0:
        raise InputError(
            "no answer has ended yet: completions alone say nothing before the first",
            hint="a server log or /metrics pages say more, and earlier",
        )
    if ended > requests:
        raise InputError(
            f"{ended:.0f} answers ended, more than the {requests} of the run",
            hint="give all requests of the run with --requests",
        )
    elapsed = seen[-1][0]
    if ended == requests:
        last = max(t for t, c in seen if c > 0)
        return CompletionsForecast(elapsed_s=last, forecast_s=last, low_s=last, high_s=last, done=True, limits=WHY[:1])
    start, first = _begin(seen)
    rates = _rates(seen, start)
    logs = [math.log(r) for r in rates]
    left, share = requests - ended, ended / requests
    # What lies ahead is a mean over about as many stretches as are left.
    ahead = max(1.0, STRETCHES * left / ended)
    spread = min(RATE_SD_MOST, max(statistics.stdev(logs) if len(logs) > 2 else 0.0, RATE_SD))
    mean_sd = spread * math.sqrt(1.0 / len(logs) + 1.0 / ahead)
    sd = math.hypot(mean_sd, UNSEEN_SD * (1.0 - share))
    rate = ended / max(1e-9, elapsed - start)
    rest = left / rate + TAIL * first * min(1.0, left / max(1.0, requests / 10))
    reach = student_quantile(STRETCHES) * sd
    return CompletionsForecast(
        elapsed_s=elapsed,
        forecast_s=elapsed + rest,
        low_s=elapsed + rest * math.exp(-reach),
        high_s=elapsed + rest * math.exp(reach),
        done=False,
        limits=WHY,
    )


def _begin(seen: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Where the rate begins to count, and how long the first answer took.

    Before the first end nothing is in its last tokens yet; half of that time belongs to the rate.
    """
    first = next(t for t, c in seen if c > 0)
    before = max((t for t, _ in seen if t < first), default=0.0)
    return before / 2, first


def _rates(seen: Sequence[tuple[float, float]], start: float) -> list[float]:
    """Ends a second in stretches of equal time since ``start``; a stretch without any counts half an end."""
    last = seen[-1][0]
    count = min(STRETCHES, max(1, sum(t > start for t, _ in seen)))
    width = (last - start) / count
    ended = [0.0] * count
    for t, c in seen:
        if t > start:
            ended[min(count - 1, int((t - start) / width - 1e-9))] += c
    return [max(0.5, e) / width for e in ended]
