"""The Hugging Face hub: each kind of failure has its own message, which appears quickly."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

from trainatomy.errors import NetworkError, WorkloadError
from trainatomy.training import stored_weights

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return an empty hub cache."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_an_invalid_name_is_refused(cache: Path) -> None:
    with pytest.raises(WorkloadError, match="not a name on the hub; hint"):
        stored_weights.fetch_config("google bert!", hint="; hint")


def test_without_network_the_answer_is_quick(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # no server listens on this port
    with pytest.raises(NetworkError, match=r"cannot be reached.*config\.json in a folder"):
        stored_weights.fetch_config("someone/something")


def test_cached_files_need_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_weights, "_reachable", lambda endpoint: False)
    snapshot = cache / "models--someone--something" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 48}))
    (cache / "models--someone--something" / "refs").mkdir()
    (cache / "models--someone--something" / "refs" / "main").write_text("abc")
    assert stored_weights.fetch_config("someone/something")["hidden_size"] == 48


@pytest.mark.parametrize(
    ("cause", "error", "words"),
    [
        (GatedRepoError, WorkloadError, "hf auth login"),
        (RepositoryNotFoundError, WorkloadError, "there is no someone/something on the hub"),
        (EntryNotFoundError, WorkloadError, r"no config\.json"),
        (ConnectionError, NetworkError, "cannot be read"),
    ],
)
def test_each_refusal_has_its_answer(
    cache: Path, monkeypatch: pytest.MonkeyPatch, cause: Any, error: type[Exception], words: str
) -> None:
    response = SimpleNamespace(status_code=404, headers={}, request=None)  # whichever library reads the hub
    reason = cause("no", response=response) if issubclass(cause, HfHubHTTPError) else cause("no")

    def refuse(*arguments: Any, **keywords: Any) -> None:
        raise OSError("cannot load") from reason

    monkeypatch.setattr(stored_weights, "_reachable", lambda endpoint: True)
    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", refuse)
    with pytest.raises(error, match=words):
        stored_weights.fetch_config("someone/something")
