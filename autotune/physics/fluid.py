"""A whole run in a tenth of a millisecond: the closed loop as a fluid, for ranking settings and concurrencies.

All decoding sequences advance together, one token a step. Measured on that common clock (tokens written
since the start, not seconds), who ends when depends on the length law alone: a renewal process, computed
once for each law. Seconds come in afterwards, from the step model at the batch and KV tokens of each moment.
Full KV caches are treated as processor sharing (a share of the sequences runs) with a fixed rate of
recomputed tokens; the simulator knows better there, at a hundred times the cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from autotune.physics.laws import LengthLaw
from autotune.physics.simulator import EngineLimits
from autotune.physics.steptime import StepModel

Array = npt.NDArray[np.float64]

CELLS = 160
"""Cells of the token axis up to the longest answer."""
GENERATIONS = 4
"""The start is followed for so many times the longest answer; then the loop is stationary."""
USABLE_KV = 0.91
"""Of the blocks when sequences are preempted and admitted all the time: 0.98 on average, less what the wrong
order costs (the newest wait, so the young ones are left for the end; set against the simulator)."""
RECOMPUTED = 0.6
"""Tokens computed again for each token written while the cache is full, before prefix-cache hits (simulated:
0.4-0.8 over 1-8 times the demand)."""


@dataclass(frozen=True)
class LoopShape:
    """A closed loop that starts at once with one sequence in flight: what the length law alone decides.

    Arrays are over cells of ``cell`` tokens of the common clock.
    """

    law: LengthLaw
    cell: float
    survival: Array
    """Share of the answers longer than the start of each cell of its age; one longer than the longest."""
    starts: Array
    """Requests started in each cell (the first: 1)."""
    ages: Array
    """Tokens written so far by the sequence in flight."""


@lru_cache(maxsize=64)
def loop_shape(law: LengthLaw) -> LoopShape:
    """Renewal process of a law; kept, since every setting of a study asks for the same."""
    longest = law.tokens[-1]
    cell = longest / CELLS
    mass = np.zeros(CELLS + 1)
    for tokens, weight in zip(law.tokens, law.weights, strict=True):
        # Split between two cells so that the mean is kept.
        place = max(1.0, tokens / cell)
        low = min(int(place), CELLS - 1)
        mass[low] += weight * (low + 1 - place)
        mass[low + 1] += weight * (place - low)
    survival = 1.0 - np.cumsum(mass)
    survival = np.maximum(survival, 0.0)
    size = GENERATIONS * CELLS
    starts = np.zeros(size)
    starts[0] = 1.0
    backward = mass[:0:-1]  # mass at CELLS .. 1
    padded = np.zeros(size + CELLS)
    padded[CELLS] = 1.0
    for i in range(1, size):
        padded[CELLS + i] = backward @ padded[i : CELLS + i]
    starts = padded[CELLS:]
    aged = survival * (np.arange(CELLS + 1) + 0.5) * cell
    ages = np.convolve(starts, aged)[:size]
    return LoopShape(law=law, cell=cell, survival=survival, starts=starts, ages=ages)


@dataclass(frozen=True, kw_only=True)
class FluidRun:
    """What a fluid says of a run."""

    makespan_s: float
    output_tokens_per_s: float
    """Of the stationary loop, all engines."""
    kv_usage: float
    """Demand of the stationary loop over the capacity; above 1: preemption."""
    kv_peak: float
    """Largest demand of the run over the capacity (answers that start together grow together)."""
    tail_s: float
    """From the last send."""


def fluid_run(
    model: StepModel,
    limits: EngineLimits,
    shape: LoopShape,
    *,
    prompt_tokens: float,
    requests: float,
    concurrency: float,
    engines: int = 1,
) -> FluidRun:
    """One run: ``requests`` in all, ``concurrency`` in flight over ``engines`` equal engines.

    Args:
        prompt_tokens: mean.
    """
    flight = min(concurrency, requests, limits.max_num_seqs * engines) / engines
    rounds = requests / engines / flight  # requests for each place in flight
    begun = np.cumsum(shape.starts)
    size = len(begun)
    stationary_age = shape.law.age_mean
    cell_s, steady_rate, usage = _seconds(
        model, limits, shape, np.array([flight]), np.array([flight * stationary_age]), prompt_tokens
    )
    if rounds >= begun[-1]:
        # Ramp as simulated, a stationary stretch, then the drain of a stationary population.
        ramp_s, _, ramp = _seconds(model, limits, shape, np.full(size, flight), flight * shape.ages, prompt_tokens)
        stretch = (rounds - begun[-1]) * shape.law.mean / shape.cell * cell_s[0]
        until = float(ramp_s.sum()) + float(stretch)
        alive, aged = _stationary_drain(shape)
    else:
        last = int(np.searchsorted(begun, rounds))
        starts = shape.starts[: last + 1].copy()
        starts[last] -= begun[last] - rounds
        ramp_s, _, ramp = _seconds(
            model, limits, shape, np.full(last, flight), flight * shape.ages[:last], prompt_tokens
        )
        until = float(ramp_s.sum())
        alive = np.convolve(starts, shape.survival)[last:]
        age = (np.arange(CELLS + 1) + 0.5) * shape.cell
        aged = np.convolve(starts, shape.survival * age)[last:]
    left = np.maximum(flight * alive, 1.0 / engines)
    drain_s, _, drain = _seconds(model, limits, shape, left, flight * aged, 0.0)
    # Over all engines: the chance that anybody is left at all.
    tail = float((drain_s * (1.0 - np.exp(-flight * engines * alive))).sum())
    prefill = flight * prompt_tokens * model.prefill_token_s
    return FluidRun(
        makespan_s=until + tail + prefill,
        output_tokens_per_s=float(steady_rate[0]) * engines,
        kv_usage=float(usage[0]),
        kv_peak=float(max(ramp.max(initial=0.0), drain.max())),
        tail_s=tail,
    )


def _stationary_drain(shape: LoopShape) -> tuple[Array, Array]:
    """Alive, and tokens they have written, after the last start; per sequence in flight."""
    share = shape.survival / shape.survival.sum()  # density of ages
    cells = np.arange(CELLS + 1)
    index = cells[:, None] + cells[None, :]  # age now = age then + tokens since
    kept = np.where(index <= CELLS, shape.survival[np.minimum(index, CELLS)], 0.0)
    weight = kept / shape.survival.sum() * (share[None, :] > 0)
    return weight.sum(axis=1), (weight * (index + 0.5) * shape.cell).sum(axis=1)


def _seconds(
    model: StepModel,
    limits: EngineLimits,
    shape: LoopShape,
    batch: Array,
    written: Array,
    prompt_tokens: float,
) -> tuple[Array, Array, Array]:
    """Seconds for each cell of the common clock, output tokens/s, KV demand over capacity; one engine."""
    demand = written + batch * (prompt_tokens + limits.block_size / 2)
    usage = demand / limits.kv_tokens
    share = np.minimum(1.0, USABLE_KV / np.maximum(usage, 1e-9))
    running = batch * share
    base = np.array([model.base_s(float(b)) for b in running])
    step = base + model.kv_token_s * np.minimum(demand, USABLE_KV * limits.kv_tokens)
    # Each answer brings its prompt; a full cache brings recomputation.
    prefill = prompt_tokens / shape.law.mean + np.where(share < 1, RECOMPUTED * (1 - limits.hit_share), 0.0)
    step = step + running * prefill * model.prefill_token_s
    return shape.cell * step / share, running / step, usage
