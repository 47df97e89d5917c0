from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace

import yaml

from autotune.apply.command import render_command
from autotune.apply.config import render_yaml
from autotune.records.settings import Settings
from autotune.records.winner import Winner
from tests.unit.apply.winners import WINNER


def words(command: str) -> list[str]:
    return shlex.split(command.replace("\\\n", " "), comments=True)


def test_the_command_is_what_was_measured() -> None:
    text = render_command(WINNER)
    assert words(text) == list(WINNER.argv)
    assert "# client: keep exactly 64 requests in flight, max_tokens=256" in text
    assert "\n  --max-num-seqs 64" in text


def test_bash_reads_the_command_as_it_was() -> None:
    odd = replace(WINNER, argv=("vllm", "serve", "my model's dir", "--compilation-config", '{"mode": 3}', "--x", "a b"))
    text = render_command(odd).replace("vllm serve", "printf '%s\\n' serve", 1)
    done = subprocess.run(["bash", "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == list(odd.argv[1:])


def test_the_yaml_holds_every_flag() -> None:
    data = yaml.safe_load(render_yaml(WINNER))
    assert data == {"model": "org/model", "dtype": "bfloat16", "max-num-seqs": 64, "enable-prefix-caching": False}


def test_sampling_and_verdict_are_told() -> None:
    winner: Winner = replace(WINNER, client=replace(WINNER.client, sampling={"temperature": 0.6}))
    assert '# client: sampling {"temperature": 0.6}' in render_command(winner)
    assert "send no sampling parameters" in render_command(WINNER)
    assert "unconfirmed of study s" in render_yaml(WINNER)
    assert yaml.safe_load(render_yaml(replace(WINNER, settings=Settings(), fixed=Settings()))) == {"model": "org/model"}
