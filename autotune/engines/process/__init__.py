"""Processes of servers: started, watched, ended with everything they started."""

from autotune.engines.process.record import end_orphans, orphans
from autotune.engines.process.server import ServerProcess

__all__ = ["ServerProcess", "end_orphans", "orphans"]
