"""Configs from folders, the hub's cache, the hub (a local server) and the package."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune import hub
from autotune.errors import InputError, PrerequisiteError
from autotune.hub import load_config, shipped
from autotune.physics.model_card import ModelCard

CONFIG = {"model_type": "llama", "hidden_size": 8}
ASKED: list[tuple[str, str]] = []
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def _no_cache_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_TOKEN", "hf_test")


class _Hub(http.server.BaseHTTPRequestHandler):
    """Knows ``org/model`` at main; refuses others as the hub does; notes what it was asked in ``ASKED``."""

    def do_GET(self) -> None:
        ASKED.append((self.path, self.headers.get("Authorization", "")))
        status, code, body = self._answer()
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if status == 200:
            self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _answer(self) -> tuple[int, str, bytes]:
        refused = {
            "/org/gated/": (403, "GatedRepo"),
            "/org/private/": (401, "RepoNotFound"),
            "/org/empty/": (404, "EntryNotFound"),
            "/meta-llama/Llama-3.1-8B-Instruct/": (401, "GatedRepo"),
            "/org/busy/": (503, ""),
        }
        for place, (status, code) in refused.items():
            if self.path.startswith(place):
                return status, code, b""
        if self.path.startswith("/org/broken/"):
            return 200, "", b"<html>"
        if self.path == "/org/model/resolve/main/config.json":
            return 200, "", json.dumps(CONFIG).encode()
        return 404, "RevisionNotFound", b""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    ASKED.clear()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    yield
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for given in (str(tmp_path), str(tmp_path / "config.json")):
        found = load_config(given)
        assert found.config == CONFIG
        assert (found.source, found.folder, found.revision) == ("folder", tmp_path, None)


def test_a_folder_wins_over_the_shipped_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "Qwen" / "Qwen3-32B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    assert load_config("Qwen/Qwen3-32B").source == "folder"


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no config\.json"):
        load_config(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        load_config(str(tmp_path))
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not JSON"):
        load_config(str(tmp_path))
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(InputError, match="must hold an object"):
        load_config(str(tmp_path))
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").mkdir()
    with pytest.raises(InputError, match="cannot be read"):
        load_config(str(tmp_path))


@pytest.mark.parametrize("name", ["/no/such/folder", "./nowhere", "a/b/c"])
def test_a_path_that_is_not_there(name: str) -> None:
    with pytest.raises(InputError, match="no model folder"):
        load_config(name)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-32B", "qwen/qwen3-32b", "qwen3-32B"])
def test_shipped_by_name(name: str) -> None:
    found = load_config(name, offline=True)
    assert (found.name, found.source, found.folder) == ("Qwen/Qwen3-32B", "shipped", None)
    assert found.config["num_hidden_layers"] == 64


def test_a_short_name_of_two_models_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "shipped", lambda: {"a/m": {}, "b/m": {}})
    with pytest.raises(InputError, match="no config for 'm'"):
        load_config("m")


def test_unknown_name_offline_lists_near_ones() -> None:
    with pytest.raises(InputError, match="offline") as caught:
        load_config("Qwen/Qwen3-33B")
    assert "Qwen/Qwen3-32B" in (caught.value.hint or "")
    with pytest.raises(InputError) as caught:
        load_config("zzz")
    assert "more" in (caught.value.hint or "")


def test_what_is_no_hub_name() -> None:
    with pytest.raises(InputError, match="no hub name"):
        load_config("bad name!")


def test_a_revision_is_never_replaced_by_a_shipped_config() -> None:
    with pytest.raises(InputError):
        load_config("Qwen/Qwen3-32B", "abc")


def test_the_cache_comes_first(tmp_path: Path, hub_server: None) -> None:
    repo = tmp_path / "cache" / "models--org--model"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text(json.dumps({**CONFIG, "cached": True}))
    found = load_config("org/model")
    assert found.config["cached"]
    assert (found.source, found.revision, found.folder) == ("cache", COMMIT, snapshot)
    assert not ASKED


def test_the_hub_is_asked_once_with_the_token(hub_server: None) -> None:
    found = load_config("org/model")
    assert (found.config, found.source, found.revision) == (CONFIG, "hub", COMMIT)
    assert ASKED == [("/org/model/resolve/main/config.json", "Bearer hf_test")]
    load_config("Qwen/Qwen3-8B", offline=True)
    assert len(ASKED) == 1


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("org/gated", PrerequisiteError, "gated"),
        ("org/private", PrerequisiteError, "knows no model"),
        ("org/empty", InputError, r"no config\.json"),
        ("org/busy", PrerequisiteError, "answered 503"),
        ("org/broken", InputError, "not JSON"),
    ],
)
def test_what_the_hub_refuses(hub_server: None, name: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        load_config(name)
    assert len(ASKED) == 1


def test_a_missing_revision(hub_server: None) -> None:
    with pytest.raises(InputError, match="no revision 'v9'"):
        load_config("org/model", "v9")


def test_a_gated_model_that_is_shipped(hub_server: None) -> None:
    assert load_config("meta-llama/Llama-3.1-8B-Instruct").source == "shipped"


def test_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert load_config("openai/gpt-oss-20b").source == "shipped"
    with pytest.raises(PrerequisiteError, match="cannot be reached"):
        load_config("org/model")


def test_every_shipped_config_makes_a_card() -> None:
    assert len(shipped()) >= 12
    for name, config in shipped().items():
        card = ModelCard.from_config(config, name)
        assert card.parameters > 1e8
        assert card.max_model_len >= 8192
        assert 1 in card.tp_choices(8)


def test_a_model_that_is_known_here_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")

    def asked(model: str, revision: str | None = None) -> hub.HubModel:
        raise PrerequisiteError(f"asked for {model}")

    monkeypatch.setattr(hub, "_download", asked)
    hub.known_config.cache_clear()
    assert hub.known_config("Qwen/Qwen3-32B").source == "shipped"
    with pytest.raises(PrerequisiteError, match="asked for org/unheard-of"):
        hub.known_config("org/unheard-of")
    hub.known_config.cache_clear()
