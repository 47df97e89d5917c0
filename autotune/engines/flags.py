"""Flags of ``vllm serve``: settings to a command line and back.

The rules are those of vLLM's own parser (``utils/argparse_utils.py``, read in 0.11, 0.20, 0.32 and 0.33).
``parse_argv(render(settings)) == settings`` for all settings that a command line can tell apart: a string that
reads as a number comes back as that number, except where vLLM takes text (``TEXT``).
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from autotune.engines.flagtable import (
    ALIASES,
    CHOSEN_PER_SERVER,
    JSON_LISTS,
    LISTS,
    OWNED,
    SHORT,
    SIZES,
    SWITCHES,
    TEXT,
)
from autotune.errors import InputError
from autotune.records.settings import FlagValue, Settings

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT])\Z")
_POWER = {"k": 1, "m": 2, "g": 3, "t": 4}
_NUMBER = re.compile(r"-?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\Z")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True, kw_only=True)
class ServeLine:
    """A pasted ``vllm serve`` line."""

    settings: Settings
    """Its flags; ``model`` too where it is named."""
    left_out: tuple[str, ...]
    """What belongs to each server, or to the environment: names only, since a value may be a secret."""


def render(settings: Settings) -> list[str]:
    """Words of a command line, in the order of the names.

    Raises:
        InputError: a value that no command line can say (an empty list).
    """
    words: list[str] = []
    for name, value in settings.items():
        words += _render_one(name, value)
    return words


def parse_line(text: str) -> ServeLine:
    """A line as users paste it: ``VLLM_X=1 vllm serve MODEL -tp 8 --port 8000``, with line continuations.

    Raises:
        InputError: it cannot be read, or has a flag that makes a server unmeasurable.
    """
    try:
        words = shlex.split(text.replace("\\\r\n", " ").replace("\\\n", " "))
    except ValueError as error:
        raise InputError(f"the serve line cannot be read: {error}", hint="check its quotes") from None
    left_out = []
    while words and _ASSIGNMENT.match(words[0]):
        left_out.append(words.pop(0).partition("=")[0])
    if words[:1] and words[0].rpartition("/")[2] == "vllm" and words[1:2] == ["serve"]:
        words = words[2:]
    elif "-m" in words and words[words.index("-m") + 1 :][:1] == ["vllm.entrypoints.openai.api_server"]:
        words = words[words.index("-m") + 2 :]
    flags = _parse(words)
    left_out += [name for name in flags if name in CHOSEN_PER_SERVER]
    settings = _settings({name: value for name, value in flags.items() if name not in CHOSEN_PER_SERVER})
    check_owned(settings.with_(model=None))
    return ServeLine(settings=settings, left_out=tuple(left_out))


def parse_argv(argv: Sequence[str]) -> Settings:
    """Flags of a command line, ``model`` among them where it is named; the inverse of ``render``.

    Raises:
        InputError: a word that is no flag and no value, malformed JSON, a name that is no flag.
    """
    return _settings(_parse(argv))


def parse_assignment(text: str) -> tuple[str, FlagValue]:
    """``max_num_seqs=256`` (of ``--set``): name with underscores, value as a command line would be read.

    Raises:
        InputError: no ``=``, a name that is no flag, a flag that autotune chooses.
    """
    name, separator, value = text.partition("=")
    name = _long_name(name.strip())
    if not separator or not name:
        raise InputError(f"--set takes flag=value, got {text!r}", hint="--set max_num_seqs=256")
    words = {"true": True, "false": False}
    parsed = words.get(value.strip().lower(), _value(name, value.strip()))
    check_owned(_settings({name: parsed}))
    return name, parsed


def check_owned(settings: Settings) -> None:
    """Refuse what autotune chooses itself.

    Raises:
        InputError: names the first such flag and says why.
    """
    for name in settings:
        if name in OWNED and settings[name] is not False:
            raise InputError(f"{name} is not a setting of a study: {OWNED[name]}", hint=f"leave {name} out")


def _render_one(name: str, value: FlagValue) -> list[str]:
    if name == "optimization_level":
        return [f"-O{value}"]  # the one spelling that vLLM 0.11 knows as well
    flag = _flag(name)
    if "." in name:
        return [flag, value if isinstance(value, str) else json.dumps(value)]
    if isinstance(value, bool):
        return [flag] if value else [f"--no-{flag[2:]}"]
    if isinstance(value, dict) or name in JSON_LISTS:
        return [flag, json.dumps(value)]
    if isinstance(value, list):
        if not value:
            raise InputError(f"{name} is an empty list, which no command line can say", hint=f"leave {name} out")
        return [flag, *(item if isinstance(item, str) else json.dumps(item) for item in value)]
    text = str(value)
    return [f"{flag}={text}"] if text.startswith("-") or not text else [flag, text]


def _flag(name: str) -> str:
    """``max_num_seqs`` -> ``--max-num-seqs``; what follows a dot is a field and keeps its underscores."""
    head, dot, field = name.partition(".")
    return f"--{head.replace('_', '-')}{dot}{field}"


def _parse(argv: Sequence[str]) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    words = list(argv)
    model_known = any(word == "--model" or word.startswith("--model=") for word in words)
    place = 0
    while place < len(words):
        word = words[place]
        place += 1
        if not _is_flag(word):
            if "model" in flags:
                raise InputError(f"{word!r} is neither a flag nor the value of one", hint=f"in: {shlex.join(argv)}")
            flags["model"] = word
            continue
        name, equals, given = _named(word)
        values = [given] if equals else []
        if not equals and not _is_switch(name):
            while place < len(words) and not _is_flag(words[place]):
                several = name in LISTS or model_known or "model" in flags or bool(_NUMBER.match(words[place]))
                if values and (name in TEXT or not several):
                    break
                values.append(words[place])
                place += 1
        if values:
            flags[name] = _several(name, values)
        elif name.startswith("no_"):
            flags[_long_name(name.removeprefix("no_"))] = False
        else:
            flags[name] = True
    return flags


def _named(word: str) -> tuple[str, bool, str]:
    """``--max-num-seqs=8``, ``-tp=8``, ``-O3``, ``-cc.mode`` -> name, whether a value is in the word, value."""
    head, equals, value = word.partition("=")
    if head.startswith("--"):
        return _long_name(head), bool(equals), value
    if head.startswith("-O"):
        level = head[2:] + value
        return "optimization_level", bool(level), level
    short, dot, field = head.partition(".")
    if short not in SHORT:
        raise InputError(f"unknown short flag {short!r}", hint=f"known: {', '.join(SHORT)}, -O0 to -O3")
    return SHORT[short] + dot + field, bool(equals), value


def _is_switch(name: str) -> bool:
    if name == "disable_access_log_for_endpoints":
        return False
    return name in SWITCHES or name.startswith(("enable_", "disable_", "no_"))


def _several(name: str, values: list[str]) -> FlagValue:
    parsed = [_value(name, value) for value in values]
    if name in LISTS or len(parsed) > 1:
        return parsed
    return parsed[0]


def _value(name: str, text: str) -> FlagValue:
    if name in TEXT:
        return text
    if name in SIZES:
        return _size(name, text)
    if "." in name or text.startswith("{") or name in JSON_LISTS:
        try:
            data: FlagValue = json.loads(text, parse_constant=str, parse_float=_finite)
            return data
        except ValueError as error:
            if "." in name:
                return text
            raise InputError(f"{name} is not JSON: {error}, in {text!r}", hint="quote it for the shell") from None
    if _NUMBER.match(text):
        number = float(text)
        if re.fullmatch(r"-?\d+", text):
            return int(text)
        return number if math.isfinite(number) else text
    return text


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is out of range")
    return number


def _size(name: str, text: str) -> int:
    """vLLM's ``human_readable_int``: small letters are powers of 1,000, capitals of 1,024; ``auto`` is -1."""
    if name == "max_model_len" and text.lower() == "auto":
        return -1
    match = _SIZE.match(text)
    if match and match[2].islower():
        return int(float(match[1]) * 1000 ** _POWER[match[2]])
    if match and match[1].isdigit():
        return int(int(match[1]) * 1024 ** _POWER[match[2].lower()])
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    raise InputError(f"{name} must be a whole number, got {text!r}", hint="32768, 32k (32,000) or 32K (32,768)")


def _long_name(flag: str) -> str:
    head, dot, field = flag.lstrip("-").partition(".")
    head = head.replace("-", "_")
    return ALIASES.get(head, head) + dot + field


def _is_flag(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not _NUMBER.match(word)


def _settings(flags: dict[str, Any]) -> Settings:
    try:
        return Settings(flags)
    except ValueError as error:
        raise InputError(str(error), hint="for example max_num_seqs, or compilation_config.cudagraph_mode") from None
