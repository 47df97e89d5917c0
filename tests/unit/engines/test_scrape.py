from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autotune.engines import scrape
from autotune.engines.scrape import (
    Metrics,
    engine_count,
    fetch,
    is_vllm,
    kv_capacity_tokens,
    looks_like_url,
    metrics_url,
    page_kind,
    parse,
    poll,
    to_sample,
)
from autotune.errors import InputError
from autotune.records.codec import encode

NOTHING = Metrics(
    generation_tokens_total=None,
    prompt_tokens_total=None,
    kv_usage_max=None,
    running=None,
    waiting=None,
    preemptions_total=None,
    prefix_cache_queries_total=None,
    prefix_cache_hits_total=None,
    engines=None,
)

V1 = """\
# HELP python_info Python platform information
# TYPE python_info gauge
python_info{implementation="CPython"} 1.0
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 30.0
vllm:num_requests_running{engine="1",model_name="m"} 34.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 99.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 1.5e+03
vllm:prompt_tokens_total{engine="1",model_name="m"} 500.0
# TYPE vllm:prompt_tokens_created gauge
vllm:prompt_tokens_created{engine="0",model_name="m"} 1.7869290186210754e+09
# TYPE vllm:prompt_tokens_cached_total counter
vllm:prompt_tokens_cached_total{engine="0",model_name="m"} 77.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 9.00719925474e+12
vllm:generation_tokens_total_created{engine="0",model_name="m"} 1.7e+09
vllm:generation_tokens_total{engine="1",model_name="m"} 7.0
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 41.0
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 100.0
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 60.0
# TYPE vllm:external_prefix_cache_hits_total counter
vllm:external_prefix_cache_hits_total{engine="0",model_name="m"} 13.0
# TYPE vllm:iteration_tokens_total histogram
vllm:iteration_tokens_total_bucket{engine="0",le="1.0",model_name="m"} 5.0
vllm:iteration_tokens_total_count{engine="0",model_name="m"} 2829.0
# TYPE vllm:request_generation_tokens histogram
vllm:request_generation_tokens_sum{engine="0",model_name="m"} 153600.0
"""


def test_v1_with_two_engines() -> None:
    assert parse(V1) == Metrics(
        generation_tokens_total=9007199254747,
        prompt_tokens_total=2000,
        kv_usage_max=0.5,
        running=64,
        waiting=4,
        preemptions_total=41,
        prefix_cache_queries_total=100,
        prefix_cache_hits_total=60,
        engines=2,
    )


def test_the_record() -> None:
    data = encode(parse(V1))
    assert data["schema"] == "autotune/scrape/1"
    assert all(isinstance(data[key], int) for key in data if key not in ("schema", "kv_usage_max"))


def test_old_names_count_where_there_is_no_new_one() -> None:
    page = 'vllm:gpu_cache_usage_perc{model_name="m"} 0.7\nvllm:gpu_prefix_cache_queries_total{model_name="m"} 8\n'
    assert parse(page).kv_usage_max == 0.7
    assert parse(page).prefix_cache_queries_total == 8
    both = page + 'vllm:kv_cache_usage_perc{model_name="m"} 0.2\nvllm:prefix_cache_queries_total{model_name="m"} 9\n'
    assert parse(both).kv_usage_max == 0.2
    assert parse(both).prefix_cache_queries_total == 9
    dead = page + 'vllm:kv_cache_usage_perc{model_name="m"} NaN\n'
    assert parse(dead).kv_usage_max == 0.7


@pytest.mark.parametrize("prefix", ["vllm:", "ray_vllm:", "ray_vllm_", "vllm_"])
def test_prefixes(prefix: str) -> None:
    page = f'{prefix}generation_tokens_total{{WorkerId="a"}} 5\n{prefix}num_requests_waiting{{WorkerId="a"}} 1\n'
    assert parse(page).generation_tokens_total == 5
    assert parse(page).engines == 1
    assert is_vllm(page)


def test_odd_values() -> None:
    assert parse(
        "vllm:kv_cache_usage_perc -1\nvllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf"
    ) == Metrics(**{**vars(NOTHING), "engines": 1})
    assert parse("vllm:num_requests_running{} 3 1395066363000").running == 3
    assert parse("  vllm:num_requests_running\t3").running == 3
    assert parse('vllm:generation_tokens{engine="0"} 5').generation_tokens_total == 5


@pytest.mark.parametrize(
    "line",
    [
        'vllm:num_requests_running{engine="0" 3',
        "vllm:num_requests_running",
        "vllm:num_requests_running gauge",
        "vllm:num_requests_running{engine=0} 3",
        "vllm:num_requests_running 1_000",
        "vllm:num_requests_running {",
        'vllm:num_requests_running{a="1",a="2"} 3',
    ],
)
def test_a_broken_line_spoils_nothing_else(line: str) -> None:
    page = f'{line}\n# TYPE\n# HELP\n#\nvllm:num_requests_waiting{{model_name="a\\"}} ,b"}} 2\r\n'
    assert parse(page).running is None
    assert parse(page).waiting == 2


def test_pages() -> None:
    assert page_kind("") == page_kind("\n \n# EOF\n") == "empty"
    assert page_kind("# TYPE vllm:num_requests_running gauge\n") == "vllm"
    assert page_kind("vllm:num_requests_running gauge") == "vllm"
    assert page_kind(V1) == "vllm"
    assert page_kind('http_requests_total{handler="/v1/models"} 1.0\n') == "other"
    assert page_kind("<!doctype html><p>vllm: a page</p>") == "other"
    assert not is_vllm("process_start_time_seconds 1")
    assert parse("process_start_time_seconds 1") == parse("") == NOTHING


def config(**labels: object) -> str:
    inside = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return f"vllm:cache_config_info{{{inside}}} 1.0\n"


def test_capacity() -> None:
    assert kv_capacity_tokens(V1) is None
    assert kv_capacity_tokens(config(block_size=16, num_gpu_blocks=7281)) == 116496
    assert kv_capacity_tokens(config(block_size=16, num_gpu_blocks="None")) is None
    assert kv_capacity_tokens(config(block_size="None", num_gpu_blocks=5)) is None
    # summed over engines by vLLM, and repeated
    two = config(engine=0, block_size=16, num_gpu_blocks=100) + config(engine=1, block_size=16, num_gpu_blocks=100)
    assert kv_capacity_tokens(two) == 1600
    # one engine's
    own = "".join(config(engine=e, block_size=16, num_gpu_blocks=100, kv_cache_size_tokens=700) for e in (0, 1))
    assert kv_capacity_tokens(own) == 1400
    assert kv_capacity_tokens(config(block_size=16, effective_attention_block_size=784, num_gpu_blocks=10)) == 7840


def test_engines() -> None:
    assert engine_count("") is None
    assert engine_count(V1) == 2
    assert engine_count("".join(config(engine=e) for e in (0, 1, 2))) == 3


def test_as_a_sample() -> None:
    sample = to_sample(parse(V1), 2.5)
    assert (sample.t_s, sample.running, sample.waiting, sample.kv_usage) == (2.5, 64, 4, 0.5)
    assert (sample.prompt_tokens, sample.preemptions, sample.prefix_queries, sample.prefix_hits) == (2000, 41, 100, 60)
    assert sample.generation_tokens == 9007199254747


def test_only_what_is_wanted_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[str] = []
    real = scrape.text_string_to_metric_families

    def spy(text: str) -> object:
        parsed.append(text)
        return real(text)

    monkeypatch.setattr(scrape, "text_string_to_metric_families", spy)
    buckets = "".join(f'vllm:e2e_request_latency_seconds_bucket{{le="{i}"}} 1\n' for i in range(600))
    assert parse(V1 + buckets).running == 64
    assert len(parsed) == len([line for line in parsed if "_bucket" not in line]) == 13


@given(
    st.one_of(st.text(max_size=300), st.lists(st.sampled_from([*V1.splitlines(), '"', "{", "vllm:"])).map("\n".join))
)
@settings(max_examples=50, deadline=None)
def test_never_raises(page: str) -> None:
    parse(page)
    page_kind(page)
    kv_capacity_tokens(page)


@pytest.mark.parametrize(
    ("given_url", "expected"),
    [
        ("localhost:8000", "http://localhost:8000/metrics"),
        (":8000", "http://127.0.0.1:8000/metrics"),
        ("http://h:1", "http://h:1/metrics"),
        ("http://h:1/metrics", "http://h:1/metrics"),
        ("http://h:1/metrics/", "http://h:1/metrics"),
        ("http://h:1/v1", "http://h:1/metrics"),
        ("http://h:1/v1/chat/completions", "http://h:1/metrics"),
        ("https://h/proxy/8000/v1/?x=1#y", "https://h/proxy/8000/metrics"),
        ("[::1]:8000/v1", "http://[::1]:8000/metrics"),
    ],
)
def test_urls(given_url: str, expected: str) -> None:
    assert metrics_url(given_url) == expected
    assert looks_like_url(given_url)


@pytest.mark.parametrize("text", ["ftp://h:1", "http://", "file:///etc/passwd", "http://ü..x", "http://h:99999999"])
def test_no_urls(text: str) -> None:
    with pytest.raises(InputError, match=r"URL|http"):
        metrics_url(text)


@pytest.mark.parametrize("text", ["page.txt", "./metrics/a.prom", "metrics", "a/b:c.txt", ""])
def test_files_do_not_look_like_urls(text: str) -> None:
    assert not looks_like_url(text)


@contextmanager
def server(status: int = 200, body: bytes = b"", location: str | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            moved = location is not None and self.path == "/metrics"
            self.send_response(307 if moved else status)
            if moved and location is not None:
                self.send_header("location", location)
            self.end_headers()
            self.wfile.write(b"" if moved else body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as httpd:
        thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{httpd.server_port}"
        finally:
            httpd.shutdown()
            thread.join()


def test_fetch() -> None:
    with server(body=V1.encode() + b"\xff") as url:
        assert parse(fetch(f"http://{url}/v1")).running == 64
    with server(body=b"vllm:num_requests_running 1", location="/metrics/") as url:
        assert parse(fetch(url)).running == 1


def test_fetch_reads_so_much_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrape, "PAGE_LIMIT", 10)
    with server(body=b"x" * 500_000) as url:
        assert 10 < len(fetch(url)) <= 500_000


def test_fetch_fails_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with server(status=404) as url, pytest.raises(InputError, match="HTTP 404: not a vLLM server") as not_found:
        fetch(url)
    assert not_found.value.hint
    with pytest.raises(InputError, match="does not answer") as nobody:
        fetch("127.0.0.1:1", timeout=1.0)
    assert nobody.value.hint


def test_poll() -> None:
    pages = iter([V1, None, "vllm:num_requests_running 5"])

    def read() -> str:
        page = next(pages)
        if page is None:
            raise InputError("gone", hint="wait")
        return page

    readings = list(poll(read, every_s=0.01, count=3))
    assert [r.metrics.running if r.metrics else None for r in readings] == [64, None, 5]
    assert [r.error for r in readings] == [None, "gone", None]
    assert readings[0].t < readings[1].t < readings[2].t


def test_poll_keeps_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    sleeps: list[float] = []

    def sleep(seconds: float) -> None:
        sleeps.append(round(seconds, 6))
        now[0] += seconds

    def read() -> str:
        now[0] += 0.25 if len(sleeps) != 1 else 2.5
        return ""

    monkeypatch.setattr(scrape.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(scrape.time, "sleep", sleep)
    assert len(list(poll(read, every_s=1.0, count=4))) == 4
    assert sleeps == [0.75, 0.5, 0.75]
