"""Fetch ``config.json`` from the Hugging Face hub, and nothing else; fail within seconds without a network."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

from trainatomy.errors import NetworkError, WorkloadError

_TIMEOUT_SECONDS = 5.0


def fetch_config(name: str, *, hint: str = "") -> dict[str, Any]:
    """Return the configuration of ``name`` from the hub's cache on this machine or from the hub.

    Args:
        name: Name of a repository on the hub.
        hint: End of the message if the name is unknown.

    Raises:
        WorkloadError: There is no such repository, or no permission to read it.
        NetworkError: The hub cannot be reached.
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        is_cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        raise WorkloadError(f"model.id: {name!r} is not a name on the hub{hint}", key="model.id") from None
    if not is_cached and (constants.HF_HUB_OFFLINE or not _reachable(constants.ENDPOINT)):
        raise NetworkError(
            f"model.id: {name} does not ship with trainatomy, is not in the hub's cache on this machine, and the hub "
            f"cannot be reached{hint}. With its config.json in a folder on this machine, give the folder as model.id"
        )
    return _download(name, hint, local_files_only=is_cached)


def _reachable(endpoint: str) -> bool:
    """Return whether the hub answers; huggingface_hub itself would try for 20 seconds and print a line per attempt."""
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS).close()
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True


def _download(name: str, hint: str, *, local_files_only: bool) -> dict[str, Any]:
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError
    from transformers import PreTrainedConfig

    try:
        raw, _ = PreTrainedConfig.get_config_dict(name, local_files_only=local_files_only)
    except OSError as error:
        cause = error.__cause__ or error
        if isinstance(cause, GatedRepoError):
            raise WorkloadError(
                f"model.id: {name} is gated: accept its terms at https://huggingface.co/{name} and run `hf auth login`",
                key="model.id",
            ) from None
        if isinstance(cause, RepositoryNotFoundError):
            raise WorkloadError(f"model.id: there is no {name} on the hub{hint}", key="model.id") from None
        if isinstance(cause, EntryNotFoundError):
            raise WorkloadError(f"model.id: {name} has no config.json on the hub", key="model.id") from None
        raise NetworkError(f"model.id: the configuration of {name} cannot be read: {error}") from error
    if not raw:
        raise WorkloadError(f"model.id: {name} has no config.json on the hub", key="model.id")
    return dict(raw)
