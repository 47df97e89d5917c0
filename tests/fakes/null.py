"""Starts the null server for tests and talks to it."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

from autotune.engines.driver import Target


class Null:
    """A running null server; ends with its ``close`` or with the test process."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("null_server.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.base_url = f"http://127.0.0.1:{int(self.process.stdout.readline())}"

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
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
