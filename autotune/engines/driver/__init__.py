"""The load generator: holds exactly N requests in flight against one server and reads its counters.

    observation = drive(Target(base_url="http://127.0.0.1:8000", model="m", metrics_url=...), load,
                        stop=SteadyWindow(spec), alive=process.failure)

- ``target``: where requests go; ``wire``: what they say and how answers are read; ``exchange``: one
  request; ``loop``: the closed loop; ``watch``: the server's counters and life, and the client's own lag.
"""

from autotune.engines.driver.loop import drive
from autotune.engines.driver.target import Target

__all__ = ["Target", "drive"]
