"""A Prometheus page of a vLLM server, any version -> ``Metrics``; from text, a file or a server.

Only the few samples that are wanted go through the parser, line by line: a page of 600 lines, most of them
histogram buckets, costs about a millisecond, and a broken line spoils nothing else.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample as PrometheusSample

from autotune.errors import InputError
from autotune.records.observation import Sample

PAGE_LIMIT = 64 << 20
"""Bytes of an answer that are read."""

# Names in order of preference: the first that has a value counts, the others (older spellings) are never added.
_RUNNING = ("num_requests_running",)
_WAITING = ("num_requests_waiting",)
_KV_USAGE = ("kv_cache_usage_perc", "gpu_cache_usage_perc")
_GENERATION = ("generation_tokens_total", "generation_tokens")
_PROMPT = ("prompt_tokens_total", "prompt_tokens")
_PREEMPTIONS = ("num_preemptions_total", "num_preemptions")
_QUERIES = ("prefix_cache_queries_total", "gpu_prefix_cache_queries_total", "prefix_cache_queries")
_HITS = ("prefix_cache_hits_total", "gpu_prefix_cache_hits_total", "prefix_cache_hits")
_CONFIG = ("cache_config_info",)
_WANTED = frozenset(
    (*_RUNNING, *_WAITING, *_KV_USAGE, *_GENERATION, *_PROMPT, *_PREEMPTIONS, *_QUERIES, *_HITS, *_CONFIG)
)
# `vllm:name`, behind Ray `ray_vllm:name` or, in newer Ray, `ray_vllm_name`.
_NAME = re.compile(r"\s*(?:ray_)?vllm[:_](\w+)")
_VLLM_FAMILY = re.compile(r"^\s*(?:# (?:HELP|TYPE) )?(?:ray_)?vllm[:_]\w", re.MULTILINE)
_HOST = re.compile(r"(?:\[[0-9a-fA-F:]+\]|[\w.-]+)?:\d{1,5}(?:/|$)")

Page = Literal["vllm", "empty", "other"]
"""``vllm``: names a vLLM metric; ``empty``: has no sample at all; ``other``: some other program's page."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """What one page says, over all engines; ``None`` where it does not say it."""

    SCHEMA: ClassVar[str] = "autotune/scrape/1"

    generation_tokens_total: int | None
    """Counters are summed over all label sets."""
    prompt_tokens_total: int | None
    """Cached tokens included."""
    kv_usage_max: float | None
    """Largest over engines, 0..1."""
    running: int | None
    waiting: int | None
    preemptions_total: int | None
    prefix_cache_queries_total: int | None
    """Tokens."""
    prefix_cache_hits_total: int | None
    engines: int | None
    """Different label sets of ``num_requests_waiting``."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One look at a source: the metrics, or why there are none."""

    t: float
    """Unix time, seconds."""
    metrics: Metrics | None
    error: str | None


def parse(text: str) -> Metrics:
    """Read a page; whatever it holds, this never raises."""
    samples = _samples(text)
    labels = {tuple(sorted(sample.labels.items())) for sample in samples.get(_WAITING[0], ())}
    return Metrics(
        generation_tokens_total=_total(samples, _GENERATION),
        prompt_tokens_total=_total(samples, _PROMPT),
        kv_usage_max=max(_values(samples, _KV_USAGE), default=None),
        running=_total(samples, _RUNNING),
        waiting=_total(samples, _WAITING),
        preemptions_total=_total(samples, _PREEMPTIONS),
        prefix_cache_queries_total=_total(samples, _QUERIES),
        prefix_cache_hits_total=_total(samples, _HITS),
        engines=len(labels) or None,
    )


def page_kind(text: str) -> Page:
    """Whether a page is a vLLM server's; an HTML page or any other text with content is ``other``."""
    if _VLLM_FAMILY.search(text):
        return "vllm"
    lines = (line.strip() for line in text.splitlines())
    return "other" if any(line and not line.startswith("#") for line in lines) else "empty"


def is_vllm(text: str) -> bool:
    """Whether the page names a metric of vLLM."""
    return page_kind(text) == "vllm"


def kv_capacity_tokens(text: str) -> int | None:
    """KV cache in tokens, summed over engines, from ``cache_config_info``; ``None``: the page does not say.

    ``kv_cache_size_tokens`` (vLLM 0.2x and later) is one engine's. ``num_gpu_blocks`` is already the sum over
    data-parallel engines and repeated for each, and for hybrid models blocks x block size is too much.
    """
    configs = [sample.labels for sample in _samples(text).get(_CONFIG[0], ())]
    sizes = [_number(labels.get("kv_cache_size_tokens")) for labels in configs]
    known = [size for size in sizes if size is not None]
    if known:
        return sum(known)
    blocks = []
    for labels in configs:
        count = _number(labels.get("num_gpu_blocks"))
        size = _number(labels.get("effective_attention_block_size")) or _number(labels.get("block_size"))
        if count is not None and size is not None:
            blocks.append(count * size)
    return max(blocks, default=None)


def engine_count(text: str) -> int | None:
    """Engines that ``cache_config_info`` speaks of, else those with a queue; ``None``: the page does not say."""
    configs = _samples(text).get(_CONFIG[0], ())
    return len({sample.labels.get("engine", "") for sample in configs}) or parse(text).engines


def to_sample(metrics: Metrics, t_s: float) -> Sample:
    """The same as a sample of an observation, ``t_s`` seconds after the first send."""
    return Sample(
        t_s=t_s,
        running=metrics.running,
        waiting=metrics.waiting,
        kv_usage=metrics.kv_usage_max,
        generation_tokens=metrics.generation_tokens_total,
        prompt_tokens=metrics.prompt_tokens_total,
        preemptions=metrics.preemptions_total,
        prefix_queries=metrics.prefix_cache_queries_total,
        prefix_hits=metrics.prefix_cache_hits_total,
    )


def looks_like_url(source: str) -> bool:
    """Whether a source that is no file means a server: ``http://...``, ``host:8000``, ``:8000``."""
    return "://" in source or _HOST.match(source) is not None


def metrics_url(source: str) -> str:
    """The address of the page from what people give: ``host:port``, ``.../v1``, ``.../metrics``.

    Raises:
        InputError: not http(s), or without a host.
    """
    import httpx

    text = source.strip()
    text = text if "://" in text else f"http://{'127.0.0.1' if text.startswith(':') else ''}{text}"
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as error:
        raise InputError(f"not a URL: {source!r} ({error})", hint="give http://HOST:PORT/metrics") from error
    if url.scheme not in ("http", "https") or not url.host or (url.port or 0) > 65535:
        raise InputError(f"metrics are read over http or https, got {source!r}", hint="give http://HOST:PORT/metrics")
    path = re.sub(r"/v1(?:/.*)?$", "", url.path.rstrip("/"))
    path = path if path.endswith("/metrics") else f"{path}/metrics"
    return str(url.copy_with(path=path, query=None, fragment=None))


def fetch(url: str, timeout: float = 10.0) -> str:
    """Get a page.

    Args:
        url: anything that ``metrics_url`` takes.
        timeout: seconds to wait for a connection, and for each piece of the answer.

    Raises:
        InputError: nobody answers, or with an error.
    """
    import httpx

    address = metrics_url(url)
    body = bytearray()
    try:
        with (
            httpx.Client(timeout=timeout, follow_redirects=True, trust_env=False) as client,
            client.stream("GET", address) as answer,
        ):
            for chunk in answer.iter_bytes():
                body += chunk
                if len(body) > PAGE_LIMIT:
                    break
            status = answer.status_code
    except httpx.HTTPError as error:
        raise InputError(
            f"{address} does not answer: {error or type(error).__name__}",
            hint="is the server up, and is this its host and port?",
        ) from error
    if status != 200:
        raise InputError(
            f"{address} answers with HTTP {status}: not a vLLM server",
            hint="give the address of the vLLM server itself, such as http://HOST:8000",
        )
    return body.decode("utf-8", "replace")


def poll(read: Callable[[], str], *, every_s: float, count: int | None = None) -> Iterator[Reading]:
    """Read a source again and again, at a fixed rate; a failing read is reported and tried again.

    Args:
        read: gives the page; raises ``InputError`` where it cannot.
        every_s: seconds from one reading to the next; late ones are not made up for.
        count: stop after so many readings; ``None``: never.
    """
    start = time.monotonic()
    done = 0
    while count is None or done < count:
        if done:
            late_s = (time.monotonic() - start) % every_s
            time.sleep(every_s - late_s)
        done += 1
        now = time.time()
        try:
            yield Reading(t=now, metrics=parse(read()), error=None)
        except InputError as error:
            yield Reading(t=now, metrics=None, error=error.message)


def _samples(text: str) -> dict[str, list[PrometheusSample]]:
    """The wanted samples by bare name."""
    found: dict[str, list[PrometheusSample]] = {}
    for line in text.splitlines():
        if "vllm" not in line or (match := _NAME.match(line)) is None or match[1] not in _WANTED:
            continue
        try:
            for family in text_string_to_metric_families(line):
                found.setdefault(match[1], []).extend(family.samples)
        except (ValueError, IndexError, KeyError):
            continue
    return found


def _values(samples: dict[str, list[PrometheusSample]], names: tuple[str, ...]) -> list[float]:
    """The values of the first name that has any; NaN says nothing, -1 means that it is off."""
    for name in names:
        values = [float(s.value) for s in samples.get(name, ()) if math.isfinite(s.value) and s.value >= 0]
        if values:
            return values
    return []


def _total(samples: dict[str, list[PrometheusSample]], names: tuple[str, ...]) -> int | None:
    values = _values(samples, names)
    return round(math.fsum(values)) if values else None


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None
