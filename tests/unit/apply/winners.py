"""A winner made by hand."""

from __future__ import annotations

from autotune.records.settings import Settings
from autotune.records.winner import ClientSide, Gain, Winner
from tests.unit.search.results import load

WINNER = Winner(
    study="s",
    verdict="unconfirmed",
    why="all trials were used",
    trial=3,
    model="org/model",
    settings=Settings(max_num_seqs=64, enable_prefix_caching=False),
    fixed=Settings(dtype="bfloat16"),
    client=ClientSide(concurrency=64, max_tokens=256, sampling=None, request_limit_s=248.0),
    measurement=load(64, 1234.0),
    gains=(
        Gain(baseline="vLLM defaults at 8 in flight", ratio=1.62, low=1.55, high=1.7),
        Gain(baseline="yours", ratio=None, low=None, high=None),
    ),
    forecast=None,
    startup_s=31.0,
    gpus="1xH200",
    vllm_command="vllm serve",
    trials=6,
    written_at="2026-11-30T00:00:00+00:00",
    argv=("vllm", "serve", "org/model", "--dtype", "bfloat16", "--max-num-seqs", "64", "--no-enable-prefix-caching"),
    settles="repeat it",
)
