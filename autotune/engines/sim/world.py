"""The hidden world of the simulator: a machine that is like the physics says, but not quite."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass

from autotune.errors import InputError
from autotune.physics.gpus import GIB, Hardware
from autotune.physics.layout import Layout, read_layout
from autotune.physics.memory import Fit, MemoryModel, adjusted, fits
from autotune.physics.model_card import ModelCard
from autotune.physics.simulator import EngineLimits, Noise
from autotune.physics.stepstart import engine_limits, from_card
from autotune.physics.steptime import CONSTANTS, StepModel
from autotune.records.settings import FlagValue, Settings

CONSTANT_SD, START_SD, WINDOW_SD, STEP_SD = 0.10, 0.01, 0.01, 0.02
"""Standard deviations of logarithms: the step constants of a world, a start, a load, one second of steps."""
MEMORY_SD = 0.3 * GIB
"""Of the overhead that the memory prior does not know."""
MOST_HITS = 0.6
"""Of a preempted sequence, the prefix cache still holds up to this share."""
OOM_ABOVE = 0.96
"""In every other world a server with a larger ``gpu_memory_utilization`` runs out of memory under load."""
CONTEXT_TOKENS = 8192
"""Context at which layers with windows or states are counted (as in ``physics.stepstart``)."""


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What a server with certain flags truly is."""

    fit: Fit
    model: StepModel
    """Steps of one engine, tilts included, noise not."""
    limits: EngineLimits
    """Of one engine."""
    utilization: float
    """``gpu_memory_utilization``, vLLM's default where it is left out."""

    @property
    def engines(self) -> int:
        """Data-parallel engines."""
        return self.fit.engines


class SimWorld:
    """One machine; the same seed and tilts are the same machine."""

    def __init__(
        self,
        seed: int = 0,
        *,
        tilt: Mapping[str, float] | None = None,
        residual_sd: float = 0.0,
        oom_above: float | None = None,
    ) -> None:
        """A world.

        Args:
            seed: of the constants, the memory overhead, the hit share, lengths and all noise.
            tilt: factors on the speed of servers by their flags, ``{"tensor_parallel_size=8": 0.7}``; several
                flags joined by commas name one family, ``"tensor_parallel_size=2,data_parallel_size=4"``.
                Flags that are left out count with vLLM's default.
            residual_sd: standard deviation of the logarithm of a factor of each set of flags of its own.
            oom_above: ``gpu_memory_utilization`` above which servers die under load; ``None``: by chance.

        Raises:
            InputError: a tilt that cannot be read, or a factor that is not above 0.
        """
        self.seed = seed
        self.tilt = {name: (_conditions(name), _factor(name, value)) for name, value in (tilt or {}).items()}
        self.residual_sd = residual_sd
        rng = self._rng("world")
        self._factors = {name: math.exp(rng.gauss(0.0, CONSTANT_SD)) for name in CONSTANTS}
        # The model shrinks the mean of its residuals a little; one of this size is all but the whole truth.
        self._memory = MemoryModel(residuals=(rng.gauss(0.0, MEMORY_SD),))
        self._hit_share = rng.uniform(0.0, MOST_HITS)
        drawn = OOM_ABOVE if rng.random() < 0.5 else 1.0
        self.oom_above = drawn if oom_above is None else oom_above

    def hidden_truth(self, card: ModelCard, hardware: Hardware, settings: Mapping[str, object]) -> Truth:
        """What a server with these flags (fixed ones included) truly does; for this package and for tests.

        Raises:
            InputError: a flag that is no number where one is needed.
        """
        fit = fits(card, hardware, settings, self._memory)
        layout = read_layout(settings, adjusted(card, settings), hardware.gpu, self._memory.rules)
        model = from_card(card, hardware, settings, self._memory).scaled(**self._factors)
        slow = 1.0 / self._speed(settings, layout)
        held = fit.kv_capacity_tokens if card.uniform else fit.kv_capacity_at(CONTEXT_TOKENS)
        # Rounding must not take away the one longest request that vLLM has made sure of.
        longest = layout.block_size * -(-fit.max_model_len // layout.block_size)
        limits = engine_limits(card, hardware, settings, max(held, layout.dp * longest))
        return Truth(
            fit=fit,
            model=model.scaled(**dict.fromkeys((*CONSTANTS, "compute_s", "expert_s"), slow)),
            limits=dataclasses.replace(limits, hit_share=self._hit_share),
            utilization=layout.gpu_memory_utilization,
        )

    def starts_slower(self, settings: Settings, start: int) -> float:
        """Factor on the cost of one start (5 %)."""
        return math.exp(self._rng("start cost", settings.fingerprint, start).gauss(0.0, 0.05))

    def noise(self, settings: Settings, start: int, load: int) -> Noise:
        """Factor on the duration of the steps of each second: of this start, of this load, and of the second."""
        common = self._rng("start", settings.fingerprint, start).gauss(0.0, START_SD)
        rng = self._rng("load", settings.fingerprint, start, load)
        common += rng.gauss(0.0, WINDOW_SD)
        return lambda: math.exp(common + rng.gauss(0.0, STEP_SD))

    def dies_after_s(self, settings: Settings, truth: Truth, start: int) -> float | None:
        """Seconds of load after which a server runs out of memory; ``None``: it does not."""
        if truth.utilization <= self.oom_above:
            return None
        return self._rng("oom", settings.fingerprint, start).uniform(5.0, 45.0)

    def share_of(self, question: str) -> float:
        """Where in the law of lengths the answer to a question lies, 0..1; the same under all settings."""
        return self._rng("length", question).random()

    def _speed(self, settings: Mapping[str, object], layout: Layout) -> float:
        known = {**_defaults(layout), **settings}
        speed = 1.0
        for conditions, factor in self.tilt.values():
            if all(known.get(name) == value for name, value in conditions.items()):
                speed *= factor
        if self.residual_sd:
            own = self._rng("residual", Settings(settings).fingerprint).gauss(0.0, self.residual_sd)
            speed *= math.exp(own)
        return speed

    def _rng(self, *parts: object) -> random.Random:
        return random.Random("\0".join(map(str, (self.seed, *parts))))


def _conditions(name: str) -> dict[str, FlagValue]:
    """``tensor_parallel_size=2,data_parallel_size=4`` -> flags and values."""
    found: dict[str, FlagValue] = {}
    for part in name.split(","):
        flag, separator, text = part.partition("=")
        if not separator or not flag.strip():
            raise InputError(f"a tilt names flag=value, got {name!r}", hint="tilt = {'tensor_parallel_size=8' = 0.7}")
        try:
            found[flag.strip()] = json.loads(text)
        except json.JSONDecodeError:
            found[flag.strip()] = text.strip()
    return found


def _factor(name: str, value: float) -> float:
    if not (value > 0 and math.isfinite(value)):
        raise InputError(f"the tilt of {name} is a factor on its speed, above 0, got {value!r}")
    return value


def _defaults(layout: Layout) -> dict[str, FlagValue]:
    """What the flags are that a tilt may name and a setting may leave out."""
    return {
        "tensor_parallel_size": layout.tp,
        "pipeline_parallel_size": layout.pp,
        "data_parallel_size": layout.dp,
        "enable_expert_parallel": layout.expert_parallel,
        "max_model_len": layout.max_model_len,
        "max_num_seqs": layout.max_num_seqs,
        "max_num_batched_tokens": layout.max_num_batched_tokens,
        "gpu_memory_utilization": layout.gpu_memory_utilization,
        "kv_cache_dtype": layout.kv_cache_dtype,
    }
