"""The seam: everything that touches a process, a socket or a GPU sits below these two methods.

``session`` is one server life, ``observe`` is one load inside it. That split is the cost model: server
flags cost a restart; concurrency, sampling and repeats do not. The contract of every implementation is
``autotune.testing.EngineContract``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from autotune.records.load import LoadPlan, Message
from autotune.records.observation import Capacity, Observation, StopRule
from autotune.records.settings import Settings


class Session(Protocol):
    """One server life."""

    @property
    def startup_s(self) -> float:
        """Seconds from the start of the process to ready."""
        ...

    @property
    def capacity(self) -> Capacity:
        """What the server can hold."""
        ...

    @property
    def argv(self) -> tuple[str, ...]:
        """Command line, without secrets, host and port; empty where there is none."""
        ...

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of what serves: ``vllm``."""
        ...

    @property
    def resolved(self) -> Mapping[str, object] | None:
        """What the server says of its own configuration, if it says it."""
        ...

    def observe(self, load: LoadPlan, *, stop: StopRule) -> Observation:
        """Run one load until ``stop`` gives a reason or nothing is left to send.

        Never raises for what the engine does: a dead engine, an error, a stall are in the observation.
        """
        ...

    def token_ids(
        self, messages: Sequence[Message], chat_template_kwargs: Mapping[str, object] | None = None
    ) -> tuple[int, ...] | None:
        """A prompt by the server's own tokenizer and chat template; ``None`` where it cannot say."""
        ...


class Engine(Protocol):
    """Starts servers."""

    def session(self, settings: Settings) -> AbstractContextManager[Session]:
        """One server with these flags; ended, with everything it started, on leaving.

        Raises:
            LaunchFailed: it did not get ready; carries the failure and the seconds it took.
            PrerequisiteError: there is nothing to start it with.
        """
        ...

    def now(self) -> float:
        """Seconds on the engine's clock: ``time.monotonic``, or virtual time in the simulator."""
        ...
