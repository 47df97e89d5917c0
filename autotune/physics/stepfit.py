"""Fit the step model to measured windows: non-negative least squares, or around a physical prior."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autotune.physics.steptime import CONSTANTS, StepModel

SATURATED_KV = 0.95
"""KV use from which a window is saturated: preemption is near, its rate is not a function of the batch."""
SLOWDOWN, SLOWDOWN_SD = 1.10, 0.08
"""Duration of a step under preemption over the model's: one run on H100s showed 1.15 at batches of 260-600."""
NOISE_FLOOR = 0.005
BURST_SD = 0.05
"""Error of the prompt rate of a burst: its ends are not sharp, its last steps not full."""
NOISE_PRIOR, NOISE_WEIGHT = 0.015, 4.0
"""Error of one window before any is seen (10-s log lines of H200s: 1.0 % rms), and its weight in windows."""


@dataclass(frozen=True, kw_only=True)
class StepWindow:
    """One steady stretch of one engine."""

    batch: float
    """Sequences decoding, mean."""
    kv_tokens: float
    """Their cached tokens, mean."""
    output_tokens_per_s: float
    prompt_tokens_per_s: float = 0.0
    kv_usage: float | None = None
    """0..1."""
    waiting: float = 0.0
    preemptions: float = 0.0
    weight: float = 1.0
    """How much it counts: 1 for ten seconds."""

    @property
    def saturated(self) -> bool:
        """Preemption, a queue or a full cache: no row for a fit."""
        return self.preemptions > 0 or self.waiting > 0 or (self.kv_usage is not None and self.kv_usage >= SATURATED_KV)


@dataclass(frozen=True, kw_only=True)
class PrefillBurst:
    """A stretch in which every step of one engine was filled up with prompt tokens (a queue of prompts)."""

    prompt_tokens_per_s: float
    step_tokens: float
    """Tokens of a step: ``max_num_batched_tokens``, or what the queue gave."""
    batch: float = 0.0
    """Sequences decoding beside, mean."""
    kv_tokens: float = 0.0
    """Cached tokens, mean."""

    def predicted(self, model: StepModel) -> float:
        """Prompt tokens per second by the model."""
        chunk = max(1.0, self.step_tokens - self.batch)
        return chunk / model.step_s(self.batch, self.kv_tokens, chunk)


def steady(windows: Iterable[StepWindow]) -> list[StepWindow]:
    """Those windows that a fit accepts."""
    return [w for w in windows if not w.saturated and w.batch > 0 and w.output_tokens_per_s > 0]


def fit(
    windows: Sequence[StepWindow],
    prior: StepModel | None = None,
    *,
    bursts: Sequence[PrefillBurst] = (),
    slowed: Sequence[StepWindow] = (),
) -> StepModel:
    """Constants from measured windows of one engine.

    With a prior: the maximum of the posterior (log-normal around the prior's constants with the prior's
    covariance, log-normal error of each window), and the covariance there. Without: non-negative least
    squares of the seconds per step, relative, for ``t0``, ``sequence``, ``kv_token`` and ``prefill_token``.
    Only beside a prior count bursts of prefill (within ``BURST_SD``) and ``slowed`` windows: those with
    preemption, whose common factor against the model is not known (``SLOWDOWN``) and fitted beside.

    Raises:
        ValueError: no window, or a saturated one (leave those out with ``steady``).
    """
    if not windows and not (prior and slowed):
        raise ValueError("a step model needs at least one window")
    for window in windows:
        if window.saturated:
            raise ValueError(f"a saturated window cannot be fitted: {window}")
        if window.batch <= 0 or window.output_tokens_per_s <= 0:
            raise ValueError(f"a window without output cannot be fitted: {window}")
    return _least_squares(windows) if prior is None else _posterior(windows, prior, bursts, slowed)


def residuals(model: StepModel, windows: Iterable[StepWindow]) -> list[float]:
    """Logarithm of measured over predicted rate, one a window."""
    return [
        math.log(w.output_tokens_per_s / max(1e-12, model.rate(w.batch, w.kv_tokens, w.prompt_tokens_per_s)))
        for w in windows
    ]


def slowdown(model: StepModel, slowed: Sequence[StepWindow]) -> float:
    """Duration of a step under preemption over the model's, from windows with preemption and the usual factor."""
    errors = residuals(model, slowed)
    weights = [w.weight / NOISE_PRIOR**2 for w in slowed]
    own = 1.0 / SLOWDOWN_SD**2
    total = own * math.log(SLOWDOWN) - sum(w * e for w, e in zip(weights, errors, strict=True))
    return math.exp(total / (own + sum(weights)))


def _least_squares(windows: Sequence[StepWindow]) -> StepModel:
    import numpy as np
    from scipy.optimize import nnls

    step = np.array([w.batch / w.output_tokens_per_s for w in windows])
    rows = np.array(
        [[1.0, w.batch, w.kv_tokens, w.prompt_tokens_per_s * s] for w, s in zip(windows, step, strict=True)]
    )
    root = np.sqrt([w.weight for w in windows])
    design = rows / step[:, None] * root[:, None]
    size = np.maximum(np.abs(design).max(axis=0), 1e-300)
    found = nnls(design / size, root)[0] / size
    model = StepModel(
        t0_s=float(found[0]),
        sequence_s=float(found[1]),
        kv_token_s=float(found[2]),
        prefill_token_s=float(found[3]),
        guesses=tuple(n for n, x in zip(CONSTANTS, [*found, 0.0], strict=True) if x == 0.0),
        rows=len(windows),
    )
    active = [i for i in range(4) if found[i] > 0]
    spread = _noise(residuals(model, windows), [w.weight for w in windows], len(active))
    scaled = design[:, active] * found[active]
    # A hundredth of a window keeps the inverse finite where two constants cannot be told apart.
    inverse = np.linalg.inv(scaled.T @ scaled / spread**2 + np.eye(len(active)) * 0.01) if active else np.zeros((0, 0))
    covariance = np.zeros((len(CONSTANTS), len(CONSTANTS)))
    covariance[np.ix_(active, active)] = inverse
    return dataclasses.replace(model, log_covariance=_tuples(covariance), noise=min(spread, NOISE_PRIOR))


def _posterior(
    windows: Sequence[StepWindow],
    prior: StepModel,
    bursts: Sequence[PrefillBurst],
    slowed: Sequence[StepWindow],
) -> StepModel:
    import numpy as np
    from scipy.optimize import least_squares

    covariance = np.array(prior.log_covariance)
    free = [i for i in range(len(CONSTANTS)) if covariance[i, i] > 0 and getattr(prior, CONSTANTS[i]) > 0]
    if not free:
        return prior
    precision = np.linalg.inv(covariance[np.ix_(free, free)] + np.eye(len(free)) * 1e-9)
    whiten = np.linalg.cholesky(precision).T
    weights = np.array([w.weight for w in windows])
    slow_root = np.sqrt([w.weight for w in slowed])

    def model_at(shift: np.ndarray) -> StepModel:
        return prior.scaled(**{CONSTANTS[i]: math.exp(s) for i, s in zip(free, shift, strict=True)})

    # The floor of compute_s makes two valleys: one start in each.
    sequence = np.array([-1.5 if CONSTANTS[i] == "sequence_s" else 0.0 for i in free])
    origin = np.append(np.zeros(len(free)), math.log(SLOWDOWN))
    starts = [origin, origin + np.append(sequence, 0.0)] if prior.compute_s and sequence.any() else [origin]
    spread = NOISE_PRIOR
    for _ in range(3):

        def errors(x: np.ndarray, sigma: float = spread) -> np.ndarray:
            model = model_at(x[:-1])
            misfit = np.array(residuals(model, windows)) * np.sqrt(weights) / sigma
            slow = (np.array(residuals(model, slowed)) + x[-1]) * slow_root / sigma
            filled = [math.log(b.prompt_tokens_per_s / b.predicted(model)) / BURST_SD for b in bursts]
            factor = [(x[-1] - math.log(SLOWDOWN)) / SLOWDOWN_SD]
            return np.concatenate([misfit, slow, filled, factor, whiten @ x[:-1]])

        found = min((least_squares(errors, x, bounds=(-6.0, 6.0)) for x in starts), key=lambda f: float(f.cost))
        starts, shift = [found.x], found.x[:-1]
        jacobian = np.asarray(found.jac, dtype=float)
        after = np.linalg.inv(jacobian.T @ jacobian)[:-1, :-1]
        used = len(free) - float(np.trace(after @ precision))
        spread = _noise(residuals(model_at(shift), windows), list(weights), used)
    covariance[np.ix_(free, free)] = after
    learnt = {CONSTANTS[i] for k, i in enumerate(free) if after[k, k] < 0.5 * prior.log_covariance[i][i]}
    return dataclasses.replace(
        model_at(shift),
        log_covariance=_tuples(covariance),
        guesses=tuple(n for n in prior.guesses if n not in learnt),
        noise=min(spread, NOISE_PRIOR),
        rows=prior.rows + len(windows),
    )


def _noise(errors: Sequence[float], weights: Sequence[float], constants: float) -> float:
    """Error of one window of weight 1: what was seen, pulled towards what is usual."""
    seen = sum(w * e * e for w, e in zip(weights, errors, strict=True))
    free = max(0.0, sum(weights) - constants)
    return max(NOISE_FLOOR, math.sqrt((seen + NOISE_WEIGHT * NOISE_PRIOR**2) / (free + NOISE_WEIGHT)))


def _tuples(matrix: object) -> tuple[tuple[float, ...], ...]:
    import numpy as np

    return tuple(tuple(float(x) for x in row) for row in np.asarray(matrix))
