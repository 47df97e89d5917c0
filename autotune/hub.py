"""From a model folder or hub name to its config: the folder's file, the hub's own, else one that is shipped."""

from __future__ import annotations

import difflib
import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from autotune.errors import InputError, PrerequisiteError

Source = Literal["folder", "cache", "hub", "shipped"]
_FILE = "config.json"
_TIMEOUT_S = 2.0
_TRUE = ("1", "true", "yes", "on")
_SHIPPED = "hub_configs"


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """One model's config and where it came from."""

    name: str
    """As given; a shipped config's full name."""
    config: Mapping[str, Any]
    revision: str | None
    """Commit of the hub's file; None for a folder or a shipped config."""
    source: Source
    folder: Path | None
    """Where ``config.json`` lies; None for one that was shipped or read from the hub."""


def load_config(model: str, revision: str | None = None, *, offline: bool | None = None) -> HubModel:
    """The config of ``model``: a local folder, else the hub's cache, else the hub, else a shipped config.

    The hub is asked once, with a short time-out, and not at all when ``offline`` or HF_HUB_OFFLINE says so. A
    shipped config is found without regard to case, and without its organisation where that is unique; it never
    stands in for a ``revision`` that was asked for by name.

    Raises:
        InputError: no such folder, no config.json in it, not JSON, or a name that nobody knows.
        PrerequisiteError: the model is on the hub but cannot be read now (gated, no network).
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return _from_folder(model, folder)
    if folder.is_file() and folder.name == _FILE:
        return _from_folder(model, folder.parent)
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise InputError(
            f"no model folder at {model}", hint=f"give a folder with a {_FILE}, or a hub name like org/model"
        )
    cached = _cached(model, revision)
    if cached is not None:
        return cached
    offline = os.environ.get("HF_HUB_OFFLINE", "").lower() in _TRUE if offline is None else offline
    problem: PrerequisiteError | None = None
    if not offline:
        try:
            return _download(model, revision)
        except PrerequisiteError as error:
            problem = error
    known = _shipped_name(model) if revision is None else None
    if known is not None:
        return HubModel(name=known, config=shipped()[known], revision=None, source="shipped", folder=None)
    if problem is not None:
        raise problem
    raise InputError(f"no config for {model!r} here, and the hub may not be asked (offline)", hint=_near(model))


@cache
def known_config(model: str) -> HubModel:
    """The same without asking the hub where the model is known here (folder, cache, shipped); kept for the process.

    Raises:
        InputError, PrerequisiteError: as ``load_config``.
    """
    try:
        return load_config(model, offline=True)
    except InputError:
        return load_config(model)


@cache
def shipped() -> dict[str, dict[str, Any]]:
    """Configs that come with the package, by full name: shapes only, no weights, no tokenizer."""
    found = {}
    for entry in (resources.files("autotune") / _SHIPPED).iterdir():
        if entry.name.endswith(".json"):
            data = json.loads(entry.read_text(encoding="utf-8"))
            found[str(data["name"])] = dict(data["config"])
    return dict(sorted(found.items()))


def _shipped_name(model: str) -> str | None:
    wanted = model.strip("/").lower()
    by_case = {name.lower(): name for name in shipped()}
    if wanted in by_case:
        return by_case[wanted]
    short = [name for name in shipped() if name.split("/", 1)[1].lower() == wanted]
    return short[0] if len(short) == 1 else None


def _near(model: str) -> str:
    names = list(shipped())
    spelled = {name.lower(): name for name in names} | {name.split("/", 1)[1].lower(): name for name in names}
    near = dict.fromkeys(spelled[n] for n in difflib.get_close_matches(model.lower(), list(spelled), n=3, cutoff=0.5))
    listed = ", ".join(near) if near else ", ".join(names[:4]) + f" and {len(names) - 4} more"
    return f"shipped are {listed}; or give a folder with the model's {_FILE}"


def _from_folder(model: str, folder: Path) -> HubModel:
    path = folder / _FILE
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"{folder} has no {_FILE}", hint="give the folder that vLLM serves, or a hub name") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    return HubModel(name=model, config=_parsed(text, str(path)), revision=None, source="folder", folder=folder)


def _parsed(text: bytes, where: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:  # no UTF-8 or no JSON
        raise InputError(f"{where}: {_FILE} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise InputError(f"{where}: {_FILE} must hold an object, got {type(config).__name__}")
    return config


def _cached(model: str, revision: str | None) -> HubModel | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(model, _FILE, revision=revision)
    except HFValidationError as error:
        raise InputError(f"{model!r} is no hub name: {error}", hint=_near(model)) from None
    if not isinstance(path, str):
        return None
    folder = Path(path).parent
    commit = folder.name if folder.parent.name == "snapshots" else None
    found = _from_folder(model, folder)
    return HubModel(name=model, config=found.config, revision=commit, source="cache", folder=folder)


def _download(model: str, revision: str | None) -> HubModel:
    """Ask the hub, one request: its own client would retry for half a minute without a network.

    Raises:
        InputError: it knows the model but not the revision or not the file.
        PrerequisiteError: anything that a shipped config can stand in for.
    """
    from huggingface_hub import get_token, hf_hub_url

    url = hf_hub_url(model, _FILE, revision=revision, endpoint=os.environ.get("HF_ENDPOINT"))
    request = urllib.request.Request(url, headers={"User-Agent": "vllm-autotune"})
    token = get_token()
    if token:
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
            text, commit = answer.read(), answer.headers.get("X-Repo-Commit")
    except urllib.error.HTTPError as error:
        error.close()
        raise _refusal(model, revision, error.code, error.headers.get("X-Error-Code") or "") from None
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "reason", error)
        raise PrerequisiteError(f"the hub cannot be reached for {model}: {why}", hint=_near(model)) from None
    return HubModel(name=model, config=_parsed(text, model), revision=commit or revision, source="hub", folder=None)


def _refusal(model: str, revision: str | None, status: int, code: str) -> InputError | PrerequisiteError:
    """The hub's answer in our words (its X-Error-Code; 401 and 403 without one mean gated or private)."""
    if code == "RevisionNotFound":
        return InputError(f"{model} has no revision {revision!r} on the hub")
    if code == "EntryNotFound":
        return InputError(
            f"{model} has no {_FILE} on the hub", hint="models that vLLM serves from safetensors have one"
        )
    if code == "GatedRepo" or (status == 403 and code != "RepoNotFound"):
        return PrerequisiteError(
            f"{model} is gated: the hub gives its {_FILE} only to accepted accounts",
            hint="accept the terms on the model's page and set HF_TOKEN, or give a local folder",
        )
    if status in (401, 404):
        return PrerequisiteError(f"the hub knows no model {model!r}, or it is private", hint=_near(model))
    return PrerequisiteError(f"the hub answered {status} for the config of {model}", hint="try again later")
