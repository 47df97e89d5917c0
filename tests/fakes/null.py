"""Starts the null server for tests and talks to it."""

from __future__ import annotations

import json
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from autotune.engines import nullserver
from autotune.engines.driver import Target


class Null:
    """A running null server; ends with its ``close`` or with the test process."""

    def __init__(self, **config: Any) -> None:
        self._stack = ExitStack()
        script = Path(__file__).with_name("null_server.py")
        self.base_url = self._stack.enter_context(nullserver.started(script=script, config=config))

    def _post(self, path: str, data: Any = None) -> Any:
        request = urllib.request.Request(self.base_url + path, json.dumps(data).encode(), method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read())

    def configure(self, **config: Any) -> None:
        """Another behaviour; forgets what was seen."""
        self._post("/config", config)

    def seen(self) -> dict[str, Any]:
        """What the server saw since it was configured."""
        seen: dict[str, Any] = self._post("/seen")
        return seen

    def target(self, **fields: Any) -> Target:
        """The server as the driver is given it."""
        whole = {
            "base_url": self.base_url,
            "model": "null",
            "metrics_url": f"{self.base_url}/metrics",
            "health_url": f"{self.base_url}/health",
            **fields,
        }
        return Target(**whole)

    def close(self) -> None:
        """End the process."""
        self._stack.close()
