"""The winner as a command line that starts exactly the server that was measured."""

from __future__ import annotations

import shlex

from autotune.apply.client import client_comments
from autotune.records.winner import Winner


def render_command(winner: Winner) -> str:
    """A shell command, with the client's side as comments above it.

    The arguments are those that the measured server was started with; host, port and served name are left to
    the user.
    """
    lines = [*client_comments(winner), _folded(winner.argv)]
    return "\n".join(lines) + "\n"


def _folded(argv: tuple[str, ...]) -> str:
    """One flag a line, each with its values, so that it can be read and pasted."""
    groups: list[list[str]] = [[]]
    for word in argv:
        if word.startswith("--"):
            groups.append([])
        groups[-1].append(word)
    return " \\\n  ".join(shlex.join(group) for group in groups if group)
