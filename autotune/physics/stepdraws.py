"""Draws from the posterior of step constants where it is far from a bell: little seen, much unknown.

A fit's covariance describes the posterior near its maximum. With constants unknown by half, sums that were
measured well come out wrong in draws from it. Here such draws are weighed by the posterior itself and drawn
again (sampling importance resampling).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from autotune.physics.stepfit import NOISE_PRIOR, SLOWDOWN, SLOWDOWN_SD, StepWindow
from autotune.physics.steptime import CONSTANTS, StepModel

Array = npt.NDArray[np.float64]

PROPOSALS = 4000
WIDER = 1.4
"""Proposals are so much wider than the fit's covariance, a third of them as wide as the prior."""


def posterior_draws(
    prior: StepModel,
    fitted: StepModel,
    windows: Sequence[StepWindow],
    slowed: Sequence[StepWindow],
    count: int,
    rng: np.random.Generator,
) -> list[tuple[StepModel, float]]:
    """Equally likely models, each with the factor by which preemption slows its steps.

    Args:
        prior: with the covariance of its constants (all must be uncertain).
        fitted: what ``fit`` made of the same windows.
        slowed: windows with preemption.
    """
    centre = np.log([getattr(prior, n) for n in CONSTANTS])
    precision = np.linalg.inv(np.array(prior.log_covariance))
    found = np.log([getattr(fitted, n) for n in CONSTANTS]) - centre
    near = np.array(fitted.log_covariance) * WIDER**2
    wide = np.array(prior.log_covariance)
    from_near = rng.random(PROPOSALS) > 1 / 3
    shifts = np.where(
        from_near[:, None],
        rng.multivariate_normal(found, near, PROPOSALS, method="eigh"),
        rng.multivariate_normal(np.zeros(len(found)), wide, PROPOSALS, method="eigh"),
    )
    density = np.logaddexp(
        math.log(2 / 3) + _log_normal(shifts - found, near), math.log(1 / 3) + _log_normal(shifts, wide)
    )
    constants = np.exp(centre + shifts)
    posterior = -0.5 * np.einsum("ij,jk,ik->i", shifts, precision, shifts)
    weights = np.array([w.weight for w in windows]) / NOISE_PRIOR**2
    posterior = posterior - 0.5 * (_errors(prior, constants, windows) ** 2 * weights).sum(axis=1)
    slow_errors = _errors(prior, constants, slowed)
    slow_weights = np.array([w.weight for w in slowed]) / NOISE_PRIOR**2
    total = float(slow_weights.sum())
    # The common logarithm of the slow-down is integrated out: what is left is how well the windows agree.
    mean = (slow_errors * slow_weights).sum(axis=1) / total if total else np.zeros(PROPOSALS)
    own = math.log(SLOWDOWN)
    if total:
        posterior = posterior - 0.5 * ((slow_errors - mean[:, None]) ** 2 * slow_weights).sum(axis=1)
        posterior = posterior - 0.5 * (mean + own) ** 2 / (1 / total + SLOWDOWN_SD**2)
    odds = np.exp(posterior - density - (posterior - density).max())
    levels = (np.arange(count) + rng.random()) / count
    chosen = np.minimum(np.searchsorted(np.cumsum(odds / odds.sum()), levels), PROPOSALS - 1)
    sd = math.sqrt(1 / (total + 1 / SLOWDOWN_SD**2))
    slow = np.exp((own / SLOWDOWN_SD**2 - total * mean) * sd**2 + sd * rng.standard_normal(PROPOSALS))
    plain = tuple(tuple(0.0 for _ in CONSTANTS) for _ in CONSTANTS)

    def model_at(row: Array) -> StepModel:
        values: dict[str, Any] = dict(zip(CONSTANTS, map(float, row), strict=True))
        return dataclasses.replace(fitted, **values, log_covariance=plain, noise=0.0)

    return [(model_at(constants[i]), max(1.0, float(slow[i]))) for i in rng.permutation(chosen)]


def _errors(model: StepModel, constants: Array, windows: Sequence[StepWindow]) -> Array:
    """Logarithm of measured over predicted rate: (proposals, windows)."""
    if not windows:
        return np.zeros((len(constants), 0))
    batch = np.array([w.batch for w in windows])
    kv = np.array([w.kv_tokens for w in windows])
    prompts = np.array([w.prompt_tokens_per_s for w in windows])
    rate = np.array([w.output_tokens_per_s for w in windows])
    t0, sequence, kv_token, prefill, beyond = (constants[:, k : k + 1] for k in range(5))
    base = np.maximum(t0 + sequence * batch, model.compute_s * batch)
    step = base + beyond * np.maximum(0.0, batch - model.graph_limit) + kv_token * kv
    free = np.maximum(1e-3, 1.0 - prefill * prompts)
    return np.asarray(np.log(rate * step / (batch * free)))


def _log_normal(shifts: Array, covariance: Array) -> Array:
    """Logarithm of a normal density around zero, up to the same constant for all covariances."""
    inverse = np.linalg.inv(covariance + np.eye(len(covariance)) * 1e-12)
    _, volume = np.linalg.slogdet(covariance + np.eye(len(covariance)) * 1e-12)
    return np.asarray(-0.5 * np.einsum("ij,jk,ik->i", shifts, inverse, shifts) - 0.5 * volume)
