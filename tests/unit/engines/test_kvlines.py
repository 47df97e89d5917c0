from __future__ import annotations

import pytest

from autotune.engines.kvlines import KvLines
from autotune.engines.logline import parse
from tests.unit.engines import server_logs as logs


def tokens(text: str, *, banners: bool = True) -> int | None:
    kv = KvLines()
    for physical in text.splitlines():
        for line in parse(physical):
            if banners and "server version" in line.text:
                kv.server_started()
            kv.take(line)
    return kv.tokens


CORE0, CORE1 = "(EngineCore_DP0 pid=80) ", "(EngineCore_DP1 pid=81) "

CASES = {
    "nothing": ("", None),
    "one": (logs.kv_line("1,234,567"), 1234567),
    "workers of one engine differ": (logs.TP2, 1984),
    "unnamed workers": (logs.UNNAMED_TP4, 1984),
    "unnamed engines": (logs.UNNAMED_DP2, 3000),
    "engines with workers": (logs.DP2_TP2, 4984),
    "one line with the concurrency": (logs.CPU_033, 46592),
    "V0 with block size": (logs.V0_JOURNALD, 1600),
    "V0 without": ("INFO 03-19 06:35:49 x.py:57] # GPU blocks: 2987, # CPU blocks: 4096", None),
    "V0 cuda": ("args: block_size=32\nINFO 03-19 06:35:49 x.py:57] # cuda blocks: 10, # CPU blocks: 4096", 320),
    "two servers of Ray": (logs.RAY_PAIR, 572),
    "two services": (logs.COMPOSE_PAIR, 3000),
    "workers that print": (
        "\n".join(
            logs.kv_line(size, f"(Worker_DP{rank}_TP{tp} pid={rank}{tp}) ")
            for rank, size in ((0, "100"), (1, "200"))
            for tp in (0, 1)
        ),
        300,
    ),
    "unnamed workers of one engine": ("\n".join(logs.kv_line(s, "(Worker_TP0 pid=1) ") for s in ("9", "8")), 8),
    "no whole number of lines an engine": (
        "\n".join([logs.engine_start(""), logs.engine_start(""), *(logs.kv_line(s, "") for s in ("5", "4", "6"))]),
        4,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_capacity(case: str) -> None:
    text, expected = CASES[case]
    assert tokens(text) == expected


def test_a_restart_starts_anew() -> None:
    banner = "INFO 10-09 13:00:00 [api_server.py:1896] vLLM API server version 0.9.0"
    first = "\n".join([banner, logs.engine_start(CORE0), logs.kv_line("100", CORE0)])
    assert tokens(f"{first}\n{banner}") == 100
    assert tokens(f"{first}\n{banner}\n{logs.kv_line('30', CORE0)}") == 30
    assert tokens(f"{first}\n{banner}\n{logs.engine_start(CORE1)}\n{logs.kv_line('30', CORE1)}") == 30


def test_engines_of_a_later_program_replace_those_before() -> None:
    text = "\n".join(
        [logs.engine_start(CORE0), logs.kv_line("100", CORE0), logs.engine_start(CORE1), logs.kv_line("30", CORE1)]
    )
    assert tokens(text) == 30


def test_a_log_full_of_such_lines_stays_small() -> None:
    kv = KvLines()
    (line,) = parse(logs.kv_line("7"))
    for _ in range(5000):
        kv.take(line)
    assert kv.tokens == 7
    assert sum(map(len, kv._sizes.values())) == 4096
