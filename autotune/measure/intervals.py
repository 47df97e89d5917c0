"""How sure a rate is: given the lengths (for comparisons), and with what is not known of them (for forecasts).

All parts are standard deviations of the rate's logarithm. Batch means see the noise inside one window only, and
alone cover 30-90 % of the truth; what they cannot see is added: one start differs from the next and one load from
the next on the same server, and the step model that corrected the window is not known exactly.
"""

from __future__ import annotations

import math
import random
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

    The batch stays; context, prompts and their prefill follow each law.
    """
    rng = random.Random(seed)
    base = math.log(_rate(model, run, engines, answers.law.mean, answers.law.age_mean))
    logs = []
    for _ in range(LAW_DRAWS):
        law = answers.draw(rng)
        logs.append(math.log(_rate(model, run, engines, law.mean, law.age_mean)) - base)
    logs.sort()
    edge = round(0.025 * (LAW_DRAWS - 1))
    return Reach(low=math.exp(min(0.0, logs[edge])), high=math.exp(max(0.0, logs[-1 - edge])))


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
