"""Keeps the Hugging Face libraries from writing to stderr and from touching our environment."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator

ENVIRONMENT = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Set while the libraries work and put back afterwards, so that no server inherits it. (Older tokenizers warn
at a later fork when they ever ran in parallel.)"""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No progress bar, log line or warning inside; what goes wrong is raised and told by us."""
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    disabled = logging.root.manager.disable
    os.environ.update(ENVIRONMENT)
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
