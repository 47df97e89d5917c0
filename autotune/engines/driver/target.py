"""Where a load goes."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from autotune.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Target:
    """One server with an OpenAI-compatible API."""

    base_url: str
    """``http://host:port``, with or without ``/v1``."""
    model: str
    """Served name, as requests give it."""
    api_key: str | None = field(default=None, repr=False)
    metrics_url: str | None = None
    """Page of counters; ``None``: the server shows none."""
    health_url: str | None = None
    """Answers 503 when the engine is dead; asked only after a failed request. ``None``: not asked."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise InputError(
                f"a server's address starts with http:// or https://, got {self.base_url!r}",
                hint="for example http://127.0.0.1:8000",
            )

    def url(self, route: str) -> str:
        """Address of one route of the API, ``completions`` or ``chat/completions``."""
        return f"{self.base_url.rstrip('/').removesuffix('/v1')}/v1/{route}"

    def headers(self) -> dict[str, str]:
        """Headers of every request. Answers are not compressed: that would be CPU on both sides."""
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        return headers if self.api_key is None else {**headers, "Authorization": f"Bearer {self.api_key}"}
