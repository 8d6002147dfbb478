"""``config.json`` from the Hugging Face hub, and nothing else; an answer within seconds where there is no network."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

from trainatomy.errors import NetworkError, WorkloadError

_TIMEOUT_SECONDS = 5.0


def fetch_config(name: str, *, hint: str = "") -> dict[str, Any]:
    """The configuration of ``name``, from the hub's cache on this machine or from the hub.

    ``hint`` ends the message where the name is unknown.  Raises ``WorkloadError`` (no such repository, no permission)
    or ``NetworkError`` (the hub cannot be reached).
    """
    from huggingface_hub import constants, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        is_cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        raise WorkloadError(f"model.id: {name!r} is not a name on the hub{hint}") from None
    if not is_cached and (constants.HF_HUB_OFFLINE or not _reachable(constants.ENDPOINT)):
        raise NetworkError(
            f"model.id: {name} does not ship with trainatomy, is not in the hub's cache on this machine, and the hub "
            f"cannot be reached{hint}"
        )
    return _download(name, hint, local_files_only=is_cached)


def _reachable(endpoint: str) -> bool:
    """Whether the hub answers.  huggingface_hub would try for 20 seconds, and say so line by line."""
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
                f"model.id: {name} is gated: accept its terms at https://huggingface.co/{name} and run `hf auth login`"
            ) from None
        if isinstance(cause, RepositoryNotFoundError):
            raise WorkloadError(f"model.id: there is no {name} on the hub{hint}") from None
        if isinstance(cause, EntryNotFoundError):
            raise WorkloadError(f"model.id: {name} has no config.json on the hub") from None
        raise NetworkError(f"model.id: the configuration of {name} cannot be read: {error}") from error
    if not raw:
        raise WorkloadError(f"model.id: {name} has no config.json on the hub")
    return dict(raw)
