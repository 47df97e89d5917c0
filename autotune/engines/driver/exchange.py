"""One request: sent, read to its end, and written down; never raised for what the server does."""

from __future__ import annotations

import asyncio
import resource
import time
from dataclasses import replace

import aiohttp

from autotune.engines.driver.target import Target
from autotune.engines.driver.wire import (
    Answer,
    StreamReader,
    body_of,
    error_of_status,
    read_answer,
    shorten,
)
from autotune.errors import PrerequisiteError
from autotune.records.load import LoadPlan, Request
from autotune.records.observation import ErrorKind, RequestError, RequestOutcome

READ_BUFFER = 4 * 1024 * 1024
"""Bytes; aiohttp's own 64 KiB made answers of 50,000 tokens ten times slower (vLLM #39963)."""

CONNECT_LIMIT_S = 30.0
"""A server that does not accept a connection for so long is not there."""

KEEP_ALIVE_S = 2.0
"""vLLM closes a connection that was idle for 5 s. One that was idle for longer than this is never used
again, so that no request meets a closed one; that is why no request is ever sent twice."""

LARGEST_ERROR = 65536
"""Bytes of an error's body that are read."""


SPARE_FILES = 128
"""Open files beside one connection for each request in flight."""


def open_session(concurrency: int) -> aiohttp.ClientSession:
    """A session with no limit on connections and no time-out but the connection's.

    Raises:
        PrerequisiteError: this process may not have so many connections open.
    """
    needed = concurrency + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise PrerequisiteError(
            f"{concurrency} requests in flight need {needed} open files, the limit is {hard}",
            hint=f"ulimit -n {needed}, or fewer in flight",
        )
    if soft != resource.RLIM_INFINITY and soft < needed:  # 1,024 is a usual soft limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_LIMIT_S),
        read_bufsize=READ_BUFFER,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


class Exchange:
    """Sends the requests of one load."""

    def __init__(self, session: aiohttp.ClientSession, target: Target, load: LoadPlan) -> None:
        self.started_s = time.perf_counter()
        """Clock of the load: ``time.perf_counter()`` at its first send."""
        self.chunks = 0
        """Chunks of streams so far: a sign of life."""
        self._session, self._target, self._load = session, target, load
        self._headers = target.headers()
        self._open: dict[str, StreamReader] = {}
        """Streams that have not ended, by request id."""
        # Bodies of the first wave are ready before the first send, so that all go out at once.
        self._ready = {request.id: body_of(request, target, load) for request in load.start}

    def now_s(self) -> float:
        """Seconds since the first send."""
        return time.perf_counter() - self.started_s

    async def send(self, opened: RequestOutcome, request: Request) -> RequestOutcome:
        """Send one request and read its answer; ``opened`` with its end filled in.

        Cancelling closes the connection, which makes the server give the request up.
        """
        ready = self._ready.pop(request.id) if request.id in self._ready else None
        url, body = ready or body_of(request, self._target, self._load)
        stream = StreamReader(keep_text=self._load.keep_text) if self._load.stream else None
        if stream is not None:
            self._open[request.id] = stream
        try:
            async with asyncio.timeout(self._load.request_limit_s):
                answer = await self._exchange(url, body, stream)
        except aiohttp.ClientError as error:  # also its time-out while connecting: before TimeoutError
            answer = self._failed("connect", f"{type(error).__name__}: {error}")
        except TimeoutError:
            answer = self._failed("timeout", f"no end within {self._load.request_limit_s:g} s")
        except OSError as error:
            answer = self._failed("connect", f"{type(error).__name__}: {error}")
        self._open.pop(request.id, None)
        return self._closed(opened, answer, stream)

    def begun(self, opened: RequestOutcome) -> RequestOutcome:
        """A request that was given up before its end, with the time to its first token where it had one."""
        stream = self._open.get(opened.id)
        if stream is None or stream.first_s is None:
            return opened
        return replace(opened, ttft_s=stream.first_s - self.started_s - opened.sent_s)

    async def _exchange(self, url: str, body: bytes, stream: StreamReader | None) -> Answer:
        async with self._session.post(url, data=body, headers=self._headers, allow_redirects=False) as response:
            if response.status != 200:
                error = error_of_status(response.status, await response.content.read(LARGEST_ERROR))
                return self._failed(error.kind, error.message)
            if stream is None:
                answer = read_answer(await response.read(), keep_text=self._load.keep_text)
            else:
                async for data in response.content.iter_any():
                    stream.feed(data, time.perf_counter())
                    self.chunks += 1
                answer = stream.answer()
        return answer if answer.error is None else self._failed(answer.error.kind, answer.error.message)

    def _closed(self, opened: RequestOutcome, answer: Answer, stream: StreamReader | None) -> RequestOutcome:
        ended_s, ttft_s, itl_s = self.now_s(), None, None
        if stream is not None and answer.error is None and stream.first_s is not None:
            ttft_s = stream.first_s - self.started_s - opened.sent_s
            if stream.chunks > 1:
                itl_s = (stream.last_s - stream.first_s) / (stream.chunks - 1)
        return replace(
            opened,
            ended_s=ended_s,
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            finish_reason=answer.finish_reason,
            error=answer.error,
            ttft_s=ttft_s,
            itl_s=itl_s,
            text=answer.text,
        )

    def _failed(self, kind: ErrorKind, message: str) -> Answer:
        key = self._target.api_key
        return Answer(error=RequestError(kind=kind, message=shorten(message.replace(key, "***") if key else message)))
