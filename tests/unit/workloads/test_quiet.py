"""The libraries are silent inside, everything is as before outside."""

from __future__ import annotations

import logging
import os
import warnings

import pytest

from autotune.workloads.quiet import ENVIRONMENT, quiet


def fail_inside() -> None:
    with quiet():
        assert all(os.environ[name] == value for name, value in ENVIRONMENT.items())
        logging.getLogger("datasets").critical("inside")
        warnings.warn("an error in this test suite", stacklevel=1)
        raise ZeroDivisionError


def test_silent_inside_and_restored_outside(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    monkeypatch.delenv("HF_HUB_DISABLE_PROGRESS_BARS", raising=False)
    with pytest.raises(ZeroDivisionError):
        fail_inside()
    logging.getLogger("datasets").critical("outside")
    assert [record.message for record in caplog.records] == ["outside"]
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    assert "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ
    with pytest.raises(UserWarning):
        warnings.warn("loud again", stacklevel=1)
