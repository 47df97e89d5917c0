"""The winner as a file for ``vllm serve --config``."""

from __future__ import annotations

import yaml

from autotune.apply.client import client_comments
from autotune.records.settings import FlagValue
from autotune.records.winner import Winner


def render_yaml(winner: Winner) -> str:
    """YAML with vLLM's long flag names; the client's side stands in comments.

    Use it as ``vllm serve --config FILE`` (two words: vLLM does not expand ``--config=FILE``).
    """
    flags: dict[str, FlagValue] = {"model": winner.model}
    for name, value in (*winner.fixed.items(), *winner.settings.items()):
        flags[name.replace("_", "-")] = value
    body = yaml.safe_dump(flags, sort_keys=False, default_flow_style=False, allow_unicode=True)
    return "\n".join(client_comments(winner)) + "\n" + body
