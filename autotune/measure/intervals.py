"""How sure a rate is: given the lengths (for comparisons), and with what is not known of them (for forecasts).

All parts are standard deviations of the rate's logarithm. Batch means see the noise inside one window only, and
alone cover 30-90 % of the truth; what they cannot see is added: one start differs from the next and one load from
the next on the same server, and the step model that corrected the window is not known exactly.
"""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import dataclass

from autotune.measure.rate import Rate, t975
from autotune.measure.stationary import LongRun
from autotune.physics.lengths import AnswerLengths
from autotune.physics.steptime import StepModel
from autotune.records.measurement import Measurement

Z = 1.96
START_SD, LOAD_SD = 0.01, 0.01
"""Of one server start against another, and of one load against another on the same server: SM clocks alone vary
by 1.1 % (peers' repeats); corrected windows of one H200 start scattered by 0.7 %."""

LAW_DRAWS = 400
LAW_WIDTH = 1.1
"""Laws drawn from few answers differ a little less than the truth does from their mean (probes of 64 and 128
lognormal answers, simulated: 0.94 of the intervals covered without it, 0.95 with)."""
LARGEST_SKEW = 0.5


@dataclass(frozen=True, kw_only=True)
class Reach:
    """How far an interval reaches below and above the number: factors, at most 1 and at least 1."""

    low: float
    high: float

    def and_also(self, other: Reach) -> Reach:
        """Both errors together, independent of each other."""
        return Reach(
            low=math.exp(-math.hypot(math.log(self.low), math.log(other.low))),
            high=math.exp(math.hypot(math.log(self.high), math.log(other.high))),
        )


def given_the_lengths(rate: Rate, correction_sd: float = 0.0) -> Reach | None:
    """95 % reach of one window's rate when the lengths are as assumed; ``None``: too few readings."""
    if rate.half_width is None or rate.per_s <= 0:
        return None
    seen = (rate.half_width / rate.per_s / t975(rate.freedom)) ** 2
    variance = seen + START_SD**2 + LOAD_SD**2 + correction_sd**2
    # Only what was seen is an estimate from few batches (Welch and Satterthwaite).
    freedom = variance**2 * rate.freedom / seen**2 if seen > 0 else math.inf
    half = t975(freedom) * math.sqrt(variance)
    return Reach(low=math.exp(-half), high=math.exp(half))


def of_the_lengths(model: StepModel, run: LongRun, engines: int, answers: AnswerLengths, seed: int = 0) -> Reach:
    """95 % reach of what other laws, as likely as the best one, would make of the rate.

    The batch stays; context, prompts and their prefill follow each law. A probe that misses the longest answers
    thinks itself surer than one that has them, and is too fast: the plain quantiles of the draws cover 0.90-0.93,
    and leave the truth below them four times as often as above. So they are moved by the draws' own bias and skew
    (Hall, 1992, On the removal of skewness by transformation: by ``skew * (2 z^2 + 1) / 6`` standard deviations).
    """
    rng = random.Random(seed)
    base = math.log(_rate(model, run, engines, answers.law.mean, answers.law.age_mean))
    laws = (answers.draw(rng) for _ in range(LAW_DRAWS))
    logs = [math.log(_rate(model, run, engines, law.mean, law.age_mean)) - base for law in laws]
    bias, sd = statistics.fmean(logs), statistics.pstdev(logs)
    if sd < 1e-9:
        return Reach(low=1.0, high=1.0)
    skew = statistics.fmean(((x - bias) / sd) ** 3 for x in logs)
    shift = max(-LARGEST_SKEW, min(LARGEST_SKEW, skew)) * (2 * Z * Z + 1) / 6
    low, high = (LAW_WIDTH * (sd * (z + shift) - bias) for z in (-Z, Z))
    return Reach(low=math.exp(min(0.0, low)), high=math.exp(max(0.0, high)))


def _rate(model: StepModel, run: LongRun, engines: int, answer_tokens: float, age: float) -> float:
    batch = run.batch / engines
    return model.closed_rate(batch, batch * (run.prompt_tokens + age), run.prompt_tokens, answer_tokens)


def ratio(ours: Measurement, theirs: Measurement) -> tuple[float, float | None, float | None] | None:
    """Quotient of two rates with its 95 % interval, from the intervals given the lengths; ``None``: no two rates.

    Both loads met the same lengths, so what is not known of the lengths cancels; the rest is independent.
    """
    a, b = ours.output_tokens_per_s, theirs.output_tokens_per_s
    if not a or not b:
        return None
    middle = a / b
    if not ours.paired_low or not ours.paired_high or not theirs.paired_low or not theirs.paired_high:
        return middle, None, None
    below = math.hypot(math.log(a / ours.paired_low), math.log(theirs.paired_high / b))
    above = math.hypot(math.log(ours.paired_high / a), math.log(b / theirs.paired_low))
    return middle, middle * math.exp(-below), middle * math.exp(above)
