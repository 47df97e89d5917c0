"""Sizes as people write them."""

from __future__ import annotations

import click
import pytest

from autotune.cli.plan import Size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GiB", 80 * 1024**3),
        ("1.5g", 1.5 * 1024**3),
        ("24GB", 24e9),
        ("512 MiB", 512 * 1024**2),
        ("500kb", 500_000),
        ("1T", 1024**4),
        ("1000", 1000),
    ],
)
def test_sizes(text: str, size: float) -> None:
    assert Size().convert(text, None, None) == size


@pytest.mark.parametrize("text", ["", "GiB", "-3GiB", "3 GiB of it", "1e9"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is no size"):
        Size().convert(text, None, None)
