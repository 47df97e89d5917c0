"""Progress on stderr: one status line on a terminal, plain lines elsewhere; from events only."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TextIO

from rich.console import Console
from rich.status import Status

from autotune.records.event import Event


class _Starting:
    """A status that counts the seconds by itself: a starting server says nothing."""

    def __init__(self, tail: str) -> None:
        self._began = time.monotonic()
        self._tail = tail

    def __rich__(self) -> str:
        return f"starting {time.monotonic() - self._began:.0f} s{self._tail}"


class Progress:
    """An ``Emit`` that tells a person what is going on.

    Lines that stay: study, trial begun and ended, loads, notes. What changes every second (starting 34 s,
    measuring at 64 in flight: 1,760 tokens/s, KV 81 %) is one status line on a terminal and is left out
    elsewhere.
    """

    def __init__(self, stream: TextIO, *, trials: int | None = None) -> None:
        self._console = Console(file=stream, highlight=False, soft_wrap=True, markup=False, emoji=False)
        self._status: Status | None = None
        self._trials = trials
        self._done = 0
        self._spent_s = 0.0
        self._best: str | None = None
        self._load: int | None = None

    def __call__(self, event: Event) -> None:
        """Show one event."""
        handler = getattr(self, f"_{event.kind}", None)
        if handler is not None:
            handler(event)

    def close(self) -> None:
        """Leave a clean prompt."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _say(self, text: str) -> None:
        self._console.print(f"{time.strftime('%H:%M:%S')} {text}")

    def _now(self, text: str | _Starting) -> None:
        if not self._console.is_terminal:
            return
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        self._status.update(text)

    def _study_started(self, event: Event) -> None:
        kept = event.data.get("kept")
        if kept:
            self._done = int(str(kept))
            self._say(f"resuming: {kept} finished trials are kept")

    def _trial_started(self, event: Event) -> None:
        data = event.data
        total = f" of {self._trials}" if self._trials else ""
        name = f"{data.get('label')}: " if data.get("label") else ""
        self._say(f"trial {self._done + 1}{total} (number {event.trial}): {name}{data.get('settings')}")

    def _server_starting(self, event: Event) -> None:
        self._now(_Starting(self._tail()))

    def _server_ready(self, event: Event) -> None:
        tokens = event.data.get("kv_tokens")
        capacity = "" if tokens is None else f", KV cache {int(str(tokens)):,} tokens"
        self._say(f"  ready after {_number(event.data, 'startup_s'):.0f} s{capacity}")

    def _load_started(self, event: Event) -> None:
        self._load = int(_number(event.data, "concurrency"))
        self._now(f"loading {self._load} in flight{self._tail()}")

    def _load_sampled(self, event: Event) -> None:
        rate, kv = event.data.get("output_tokens_per_s"), event.data.get("kv_usage")
        shown = [] if rate is None else [f"{float(str(rate)):,.0f} tokens/s"]
        shown += [] if kv is None else [f"KV {float(str(kv)):.0%}"]
        phase = event.data.get("phase", "measuring")
        self._now(f"{phase} at {self._load} in flight: {', '.join(shown)}{self._tail()}")

    def _load_ended(self, event: Event) -> None:
        data = event.data
        rate, kv = data.get("output_tokens_per_s"), data.get("kv_usage")
        parts = [str(data.get("outcome"))]
        parts += [] if rate is None else [f"{float(str(rate)):,.0f} tokens/s"]
        parts += [] if kv is None else [f"KV {float(str(kv)):.0%}"]
        parts += [str(data["reasons"])] if data.get("reasons") else []
        self._say(f"  {data.get('concurrency')} in flight: {', '.join(parts)}")

    def _trial_ended(self, event: Event) -> None:
        data = event.data
        self._done += 1
        self._spent_s += _number(data, "total_s")
        rate = data.get("output_tokens_per_s")
        result = f"{data.get('failure') or 'nothing stable'}"
        if rate is not None:
            result = f"{float(str(rate)):,.0f} tokens/s at {data.get('concurrency')} in flight"
        self._say(f"  {data.get('state')}: {result}{self._tail()}")

    def _winner_changed(self, event: Event) -> None:
        self._best = f"trial {event.trial}"

    def _note(self, event: Event) -> None:
        self._say(f"note: {event.data.get('text')}")

    def _study_ended(self, event: Event) -> None:
        self.close()
        self._say(f"done: {event.data.get('why')}")

    def _tail(self) -> str:
        best = f"; best so far {self._best}" if self._best else ""
        if not self._trials or not self._done or self._trials <= self._done:
            return best
        left_s = self._spent_s / self._done * (self._trials - self._done)
        return f"{best}; about {left_s / 60:.0f} min left" if self._spent_s else best


def _number(data: Mapping[str, object], key: str) -> float:
    return float(str(data.get(key) or 0.0))
