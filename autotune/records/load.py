"""What is sent to a server in one observation: requests, and how many are in flight."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Message:
    """One chat message."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request. Exactly one of ``prompt`` (token ids) and ``messages`` is given."""

    id: str
    """Unique within a load plan."""
    max_tokens: int
    """Output limit, tokens."""
    prompt: tuple[int, ...] | None = None
    """Token ids of prompt and answer so far, sent to the completion route."""
    messages: tuple[Message, ...] | None = None
    """Chat messages, sent to the chat route."""
    prompt_tokens: int | None = None
    """Tokens of the prompt without the answer so far, chat template applied; ``None``: not counted."""
    context_tokens: int = 0
    """Tokens of the answer so far that are sent along (already part of ``prompt``)."""
    forced: bool = False
    """Generate exactly ``max_tokens`` (``ignore_eos``)."""
    salt: str | None = None
    """``cache_salt``: keeps prefix-cache blocks of different loads apart."""

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError(f"request {self.id}: exactly one of prompt and messages is needed")
        if self.max_tokens < 1:
            raise ValueError(f"request {self.id}: max_tokens must be at least 1, got {self.max_tokens}")


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """A closed loop: ``start`` is sent at once, each end is replaced from ``refill`` in order."""

    start: tuple[Request, ...]
    """Sent at once: its length *is* the concurrency."""
    refill: tuple[Request, ...] = ()
    """One for each request that ends; used up = drain."""
    request_limit_s: float = 600.0
    """A request that takes longer is cancelled and counts as timed out."""
    sampling: Mapping[str, float] | None = None
    """Sampling parameters sent with every request; ``None``: the server's generation_config applies."""
    chat_template_kwargs: Mapping[str, bool | int | float | str] | None = None
    """Arguments of the chat template, sent with every chat request (``enable_thinking``)."""
    stream: bool = False
    """Stream the answers (needed for TTFT and ITL; costs client CPU)."""
    sample_s: float = 1.0
    """Pace at which the server's counters are read."""
    stall_s: float | None = 60.0
    """No token for so long while something runs or waits is a stall; ``None``: no limit."""
    keep_text: bool = False
    """Keep the answers' text in the outcomes (probe and full run; never in a measuring window)."""

    def __post_init__(self) -> None:
        if not self.start:
            raise ValueError("a load plan needs at least one request in flight")

    @property
    def concurrency(self) -> int:
        """Requests in flight."""
        return len(self.start)


SLOWEST_TOKENS_PER_S = 2.0
"""One stream's slowest plausible speed: below it a server is of no use for long answers."""


def request_limit_s(max_tokens: int) -> float:
    """Time limit of one request: two minutes for queue and prompt, then the slowest plausible speed."""
    return 120.0 + max_tokens / SLOWEST_TOKENS_PER_S
