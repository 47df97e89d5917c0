"""Flag values of one server, under vLLM's long names with underscores."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

FlagValue: TypeAlias = bool | int | float | str | list[Any] | dict[str, Any]
"""JSON data: what a flag of ``vllm serve`` can hold."""

_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z0-9_.]+)?\Z")


class Settings(Mapping[str, FlagValue]):
    """An immutable, hashable mapping ``tensor_parallel_size -> 2``; equal when the flags are equal.

    The order of flags does not matter. A flag set to ``None`` is the same as a flag left out.
    """

    def __init__(self, values: Mapping[str, Any] | None = None, /, **flags: Any) -> None:
        merged = {**(values or {}), **flags}
        for name in merged:
            if not isinstance(name, str) or not _NAME.match(name):
                raise ValueError(f"a setting is a vLLM flag in lower case with underscores, got {name!r}")
        self._values: dict[str, FlagValue] = {name: merged[name] for name in sorted(merged) if merged[name] is not None}
        self._key = json.dumps(self._values, sort_keys=True, allow_nan=False)

    def __getitem__(self, name: str) -> FlagValue:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return self._key == other._key if isinstance(other, Settings) else NotImplemented

    def __repr__(self) -> str:
        return f"Settings({self._values!r})"

    def __str__(self) -> str:
        return " ".join(f"{name}={json.dumps(value)}" for name, value in self._values.items()) or "(vLLM defaults)"

    @property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits that name this set of flags."""
        return hashlib.sha256(self._key.encode()).hexdigest()[:8]

    def with_(self, **flags: Any) -> Settings:
        """A copy with some flags changed (``None`` removes one)."""
        return Settings({**self._values, **flags})

    def integer(self, name: str, default: int) -> int:
        """A flag that vLLM reads as a whole number, or ``default`` when it is not set."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{name} must be a whole number, got {value!r}")
        return value

    def to_data(self) -> dict[str, FlagValue]:
        """Plain JSON data."""
        return dict(self._values)

    @classmethod
    def from_data(cls, data: Any) -> Settings:
        """From JSON data.

        Raises:
            ValueError: not an object, or a name that is no flag.
        """
        if not isinstance(data, Mapping):
            raise ValueError(f"settings are an object of flags, got {data!r}")
        return cls(data)
