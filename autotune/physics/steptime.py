"""How long one engine step takes: an additive model, its constants and what is known of each.

One step of one engine that decodes ``b`` sequences over ``kv`` cached tokens and prefills ``p`` prompt
tokens takes

    t0 + sequence * b + beyond * max(0, b - graph_limit) + kv_token * kv + prefill_token * p   seconds,

never less than the arithmetic of ``b`` tokens needs (``compute_s * b``). For a mixture of experts ``t0``
holds the reading of all experts, and what a small batch leaves unread is taken off again. Four constants
of this form describe one set-up (model, tensor parallel size, data types) within about 1 % of the measured
rate on H200s; constants of data-parallel engines are those of one engine.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

CONSTANTS = ("t0_s", "sequence_s", "kv_token_s", "prefill_token_s", "beyond_s")
"""Names of the uncertain constants, in the order of ``StepModel.log_covariance``."""

_NO_COVARIANCE = tuple(tuple(0.0 for _ in CONSTANTS) for _ in CONSTANTS)


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """Constants of one engine, seconds; what is uncertain is so by a factor (log-normal)."""

    t0_s: float
    """A step at batch zero: weights, all-reduces, launch and scheduling."""
    sequence_s: float
    """Per decoding sequence."""
    kv_token_s: float
    """Per cached token that is read."""
    prefill_token_s: float
    """Per prompt token computed."""
    beyond_s: float = 0.0
    """Per sequence above ``graph_limit``, added to ``sequence_s``."""
    graph_limit: int = 512
    """Largest batch that runs as a CUDA graph."""
    compute_s: float = 0.0
    """Per decoded token when arithmetic is the limit (a floor under t0 + sequence)."""
    expert_s: float = 0.0
    """Reading all routed experts once, part of ``t0_s``; 0 for a dense model."""
    expert_share: float = 1.0
    """Share of the routed experts that one token uses."""
    guesses: tuple[str, ...] = CONSTANTS
    """Constants that rest on physics alone."""
    log_covariance: tuple[tuple[float, ...], ...] = _NO_COVARIANCE
    """Covariance of the logarithms of the constants, in the order of ``CONSTANTS``."""
    noise: float = 0.015
    """Relative error of one predicted rate beside the constants' own (read from the fit)."""
    rows: int = 0
    """Windows that it was fitted to."""

    def __post_init__(self) -> None:
        for name in CONSTANTS:
            value = getattr(self, name)
            if not (value >= 0.0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a number of seconds, at least 0, got {value!r}")

    def base_s(self, batch: float) -> float:
        """A step without KV reads and prefill, seconds."""
        linear = self.t0_s + self.sequence_s * batch
        if self.expert_s:
            linear -= self.expert_s * (1.0 - self.expert_share) ** batch
        linear = max(linear, self.compute_s * batch)
        return linear + self.beyond_s * max(0.0, batch - self.graph_limit)

    def step_s(self, batch: float, kv_tokens: float, prefill_tokens: float = 0.0) -> float:
        """One step of one engine, seconds; batch and KV tokens of that engine."""
        return self.base_s(batch) + self.kv_token_s * kv_tokens + self.prefill_token_s * prefill_tokens

    def rate(self, batch: float, kv_tokens: float, prompt_tokens_per_s: float = 0.0) -> float:
        """Output tokens per second of one engine in a steady state.

        Args:
            batch: sequences decoding at a time.
            kv_tokens: their cached tokens, prompt included.
            prompt_tokens_per_s: prompt tokens computed beside, per second.
        """
        free = max(0.0, 1.0 - self.prefill_token_s * prompt_tokens_per_s)
        return batch * free / self.step_s(batch, kv_tokens) if batch else 0.0

    def closed_rate(self, batch: float, kv_tokens: float, prompt_tokens: float, answer_tokens: float) -> float:
        """Output tokens per second of one engine whose answers are replaced as they end.

        Each answer of ``answer_tokens`` (mean) brings ``prompt_tokens`` of prefill with it.
        """
        if not batch:
            return 0.0
        prefill = self.prefill_token_s * prompt_tokens / answer_tokens
        return batch / (self.step_s(batch, kv_tokens) + batch * prefill)

    @property
    def relative_sd(self) -> Mapping[str, float]:
        """Standard deviation of each constant's logarithm (about its relative error)."""
        return {name: math.sqrt(self.log_covariance[i][i]) for i, name in enumerate(CONSTANTS)}

    def with_sd(self, **relative_sd: float) -> StepModel:
        """A copy with independent uncertainties; constants that are not named keep none."""
        rows = [[0.0] * len(CONSTANTS) for _ in CONSTANTS]
        for name, sd in relative_sd.items():
            rows[CONSTANTS.index(name)][CONSTANTS.index(name)] = sd * sd
        return dataclasses.replace(self, log_covariance=tuple(map(tuple, rows)))

    def widened(self, **relative_sd: float) -> StepModel:
        """A copy whose named constants are uncertain by so much more (variances add)."""
        rows = [list(row) for row in self.log_covariance]
        for name, sd in relative_sd.items():
            rows[CONSTANTS.index(name)][CONSTANTS.index(name)] += sd * sd
        return dataclasses.replace(self, log_covariance=tuple(map(tuple, rows)))

    def scaled(self, **factors: float) -> StepModel:
        """A copy with some constants multiplied."""
        changed = {name: getattr(self, name) * factor for name, factor in factors.items()}
        return dataclasses.replace(self, **changed)

    def draw(self, rng: random.Random) -> StepModel:
        """Constants drawn from what is known of them, the noise of a rate included in all of them."""
        factor = cholesky(self.log_covariance)
        normal = [rng.gauss(0.0, 1.0) for _ in CONSTANTS]
        common = rng.gauss(0.0, self.noise)
        shift = [sum(a * z for a, z in zip(row, normal, strict=True)) + common for row in factor]
        drawn = {n: getattr(self, n) * math.exp(s) for n, s in zip(CONSTANTS, shift, strict=True)}
        expert_s = self.expert_s * math.exp(shift[0])
        return dataclasses.replace(self, **drawn, expert_s=expert_s, log_covariance=_NO_COVARIANCE, noise=0.0)


def cholesky(matrix: tuple[tuple[float, ...], ...]) -> list[list[float]]:
    """Lower factor of a positive semidefinite matrix; a row without variance stays zero."""
    size = len(matrix)
    lower = [[0.0] * size for _ in range(size)]
    for i in range(size):
        for j in range(i + 1):
            rest = matrix[i][j] - sum(lower[i][k] * lower[j][k] for k in range(j))
            if i == j:
                lower[i][i] = math.sqrt(max(0.0, rest))
            elif lower[j][j] > 0.0:
                lower[i][j] = rest / lower[j][j]
    return lower
