"""Control calls to a server: health, models, version, configuration, counters, cache reset, token counts."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from autotune.records.load import Message

CONNECT_S = 2.0
HEALTH_S = 10.0
ANSWER_S = 30.0
"""A loaded API server may take seconds for a page of metrics; that is slow, not dead."""


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """One entry of ``/v1/models``."""

    name: str
    max_model_len: int | None
    """As in effect, also after ``--max-model-len auto``."""


class ControlError(Exception):
    """A control call failed; says which, and how."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status, ``None`` where there was no answer or not the right one."""


class Control:
    """Calls to one server. Proxies of the environment are not used: the server is on the loopback or named."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        answer_s: float = ANSWER_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """Calls to ``base_url``; ``transport`` replaces the network (tests)."""
        self.base_url = base_url.rstrip("/")
        self._client = httpx.Client(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(answer_s, connect=CONNECT_S),
            trust_env=False,
            transport=transport,
        )

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def health(self) -> int | None:
        """Status of ``/health``: 200 ready, 503 engine dead; ``None``: nobody answers."""
        try:
            return self._client.get("/health", timeout=httpx.Timeout(HEALTH_S, connect=CONNECT_S)).status_code
        except httpx.HTTPError:
            return None

    def models(self) -> tuple[ServedModel, ...]:
        """What is served, base models only.

        Raises:
            ControlError: no answer, or not the answer of an OpenAI-like server.
        """
        data = self._json("GET", "/v1/models").get("data")
        if not isinstance(data, list):
            raise ControlError(f"GET /v1/models: no list of models, got {data!r}")
        return tuple(
            ServedModel(name=entry["id"], max_model_len=_integer(entry.get("max_model_len")))
            for entry in data
            if isinstance(entry, dict) and isinstance(entry.get("id"), str) and entry.get("parent") is None
        )

    def version(self) -> str | None:
        """Version of vLLM, ``None`` where the server does not say it."""
        try:
            version = self._json("GET", "/version").get("version")
        except ControlError:
            return None
        return version if isinstance(version, str) else None

    def server_info(self) -> Mapping[str, Any] | None:
        """The configuration as resolved by the server; ``None`` without dev mode or before vLLM 0.11."""
        try:
            info = self._json("GET", "/server_info", params={"config_format": "json"})
        except ControlError:
            return None
        config = info.get("vllm_config")
        return config if isinstance(config, dict) else None

    def metrics(self) -> str:
        """The page of counters.

        Raises:
            ControlError: no answer.
        """
        return self._answer("GET", "/metrics").text

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False where it is refused (blocks in use) or not possible (no dev mode)."""
        try:
            answer = self._answer("POST", "/reset_prefix_cache")
        except ControlError:
            return False
        try:
            done = answer.json()
        except ValueError:
            return True  # before vLLM 0.20: an empty page
        return bool(done.get("success", True)) if isinstance(done, dict) else True

    def tokenize(
        self,
        model: str,
        *,
        messages: Sequence[Message] | None = None,
        prompt: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a prompt, or of messages with the chat template applied.

        Raises:
            ControlError: refused, or no answer.
        """
        body: dict[str, Any] = {"model": model}
        if messages is not None:
            body["messages"] = [{"role": message.role, "content": message.content} for message in messages]
            if chat_template_kwargs:
                body["chat_template_kwargs"] = dict(chat_template_kwargs)
        else:
            body["prompt"] = prompt or ""
        tokens = self._json("POST", "/tokenize", json=body).get("tokens")
        if not isinstance(tokens, list):
            raise ControlError("POST /tokenize: no list of tokens in the answer")
        return tuple(int(token) for token in tokens)

    def generate(self, model: str, *, tokens: int, limit_s: float) -> None:
        """A real request of ``tokens`` forced tokens: the proof that the engine generates.

        Raises:
            ControlError: refused, an error inside the answer, or no answer within ``limit_s``.
        """
        body = {"model": model, "prompt": "1 2 3", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}
        answer = self._json("POST", "/v1/completions", json=body, timeout=httpx.Timeout(limit_s, connect=CONNECT_S))
        if not answer.get("choices"):
            raise ControlError(f"POST /v1/completions: no choices in {str(answer)[:300]}")

    def _json(self, method: str, path: str, **more: Any) -> dict[str, Any]:
        answer = self._answer(method, path, **more)
        try:
            data = answer.json()
        except ValueError:
            raise ControlError(f"{method} {path}: not JSON: {answer.text[:200]!r}") from None
        if not isinstance(data, dict):
            raise ControlError(f"{method} {path}: not an object: {answer.text[:200]!r}")
        return data

    def _answer(self, method: str, path: str, **more: Any) -> httpx.Response:
        try:
            answer = self._client.request(method, path, **more)
        except httpx.HTTPError as error:
            raise ControlError(f"{method} {path}: {type(error).__name__}: {error}") from error
        if not answer.is_success:
            text = f"{method} {path}: status {answer.status_code}: {answer.text[:300]}"
            raise ControlError(text, answer.status_code)
        return answer


def api_key(environment: Mapping[str, str] | None = None) -> str | None:
    """Key of the server from the environment (``VLLM_API_KEY``), never from a command line."""
    return (os.environ if environment is None else environment).get("VLLM_API_KEY") or None


def _integer(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
