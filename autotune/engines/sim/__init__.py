"""The built-in engine: the package's own physics behind the engine seam, in virtual time.

    with SimEngine(EngineSpec(kind="sim", model="Qwen/Qwen3-32B", gpus="8xH200")).session(settings) as session:
        observation = session.observe(load, stop=SteadyWindow(spec))

- ``world``: what is hidden from the tuner: constants of the machine, tilts, noise, failures;
  ``starts``: what a start costs and why it fails; ``load``: one closed loop; ``engine``: the seam.
"""

from autotune.engines.sim.engine import SimEngine, SimSession
from autotune.engines.sim.world import SimWorld, Truth

__all__ = ["SimEngine", "SimSession", "SimWorld", "Truth"]
