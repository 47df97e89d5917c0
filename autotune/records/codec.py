"""JSON round trip of the records: ``encode(record)`` -> plain data, ``decode(cls, data)`` -> record.

Unknown keys are ignored, so that a newer study folder can still be read; a missing key without a
default, or a value of the wrong kind, is a ``RecordError`` that names the path to it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


class RecordError(ValueError):
    """Data that does not fit the record it is read as."""


def encode(value: Any) -> Any:
    """Turn a record (or a tuple, a mapping, a plain value) into JSON data."""
    if hasattr(value, "to_data"):
        return value.to_data()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        data = {f.name: encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        schema = getattr(type(value), "SCHEMA", None)
        return data if schema is None else {"schema": schema, **data}
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if isinstance(value, float) and value != value:
        return None
    return value


def decode(cls: type[T], data: Any, path: str = "") -> T:
    """Build a record of ``cls`` from JSON data.

    Raises:
        RecordError: a key is missing or a value is of the wrong kind; the message names its path.
    """
    return typing.cast(T, _decode(cls, data, path or cls.__name__))


def dumps(record: Any, *, indent: int | None = None) -> str:
    """One record as JSON text (one line unless ``indent`` is given); NaN and infinity are refused."""
    return json.dumps(encode(record), indent=indent, allow_nan=False, ensure_ascii=False)


def loads(cls: type[T], text: str) -> T:
    """A record from JSON text.

    Raises:
        RecordError: the text is no JSON, or does not fit the record.
    """
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise RecordError(f"{cls.__name__}: not JSON: {error}") from error
    return decode(cls, data)


@functools.cache
def _fields(cls: type) -> tuple[tuple[dataclasses.Field[Any], Any], ...]:
    hints = typing.get_type_hints(cls)
    return tuple((field, hints[field.name]) for field in dataclasses.fields(cls) if field.init)


def _decode(hint: Any, data: Any, path: str) -> Any:
    origin = typing.get_origin(hint)
    if hint is Any or hint is object:
        return data
    if hasattr(hint, "from_data"):
        try:
            return hint.from_data(data)
        except (TypeError, ValueError) as error:
            raise RecordError(f"{path}: {error}") from error
    if dataclasses.is_dataclass(hint):
        return _decode_record(typing.cast(type, hint), data, path)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(typing.get_args(hint), data, path)
    if origin is typing.Literal:
        if data not in typing.get_args(hint):
            raise RecordError(f"{path}: {data!r} is not one of {', '.join(map(str, typing.get_args(hint)))}")
        return data
    if origin is tuple:
        return _decode_tuple(typing.get_args(hint), data, path)
    if origin is not None and issubclass(origin, Mapping):
        key_hint, item_hint = typing.get_args(hint)
        if not isinstance(data, Mapping):
            raise RecordError(f"{path}: expected an object, got {data!r}")
        return {_decode(key_hint, k, path): _decode(item_hint, v, f"{path}.{k}") for k, v in data.items()}
    return _decode_plain(hint, data, path)


def _decode_record(cls: type, data: Any, path: str) -> Any:
    if not isinstance(data, Mapping):
        raise RecordError(f"{path}: expected an object, got {data!r}")
    values = {}
    for field, hint in _fields(cls):
        if field.name in data:
            values[field.name] = _decode(hint, data[field.name], f"{path}.{field.name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RecordError(f"{path}.{field.name} is missing")
    return cls(**values)


def _decode_union(options: tuple[Any, ...], data: Any, path: str) -> Any:
    if data is None and type(None) in options:
        return None
    errors = []
    for option in options:
        if option is type(None):
            continue
        try:
            return _decode(option, data, path)
        except RecordError as error:
            errors.append(str(error))
    raise RecordError("; ".join(errors) or f"{path}: unexpected {data!r}")


def _decode_tuple(args: tuple[Any, ...], data: Any, path: str) -> Any:
    if not isinstance(data, (list, tuple)):
        raise RecordError(f"{path}: expected a list, got {data!r}")
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_decode(args[0], item, f"{path}[{i}]") for i, item in enumerate(data))
    if len(args) != len(data):
        raise RecordError(f"{path}: expected {len(args)} items, got {len(data)}")
    return tuple(_decode(arg, item, f"{path}[{i}]") for i, (arg, item) in enumerate(zip(args, data, strict=True)))


def _decode_plain(hint: Any, data: Any, path: str) -> Any:
    if hint is float and isinstance(data, (int, float)) and not isinstance(data, bool):
        return float(data)
    if hint in (int, str, bool, type(None)) and type(data) is hint:
        return data
    if hint is int and isinstance(data, float) and data.is_integer():
        return int(data)
    raise RecordError(f"{path}: expected {getattr(hint, '__name__', hint)}, got {data!r}")
