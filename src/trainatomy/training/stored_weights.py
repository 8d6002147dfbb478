"""Checkpoints that are stored quantised: what ``config.json`` says, and what becomes of their weights.

bitsandbytes' weights are simulated (``training.quantization``).  transformers dequantises others where their kernels
are missing, or where it is told to: the model is then dense.  Everything else is refused by name.

Fetch ``config.json`` from the Hugging Face hub, and nothing else; fail within seconds without a network.

Weights that are packed in a tensor subclass: torchao's, whose tensors hold integers and their scales.

The subclass has the shape and the dtype of the weight that it stands for, but no memory; the tensors inside have.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from trainatomy.errors import NetworkError, WorkloadError
from trainatomy.libraries import version_of
from trainatomy.workload.defaults import STORED_QUANTISED
from trainatomy.workload.quantization import DEQUANTISED, LIBRARIES

if TYPE_CHECKING:
    from pathlib import Path

    from trainatomy.workload.model import ModelSpec
    from trainatomy.workload.schema import Workload


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


_LIBRARY = "torchao."


def is_packed(tensor: Any) -> bool:
    """Return whether a tensor is packed by torchao."""
    return is_packed_type(type(tensor))


def is_packed_type(kind: type) -> bool:
    """Return whether tensors of a type are packed by torchao."""
    return kind.__module__.startswith(_LIBRARY) and hasattr(kind, "__tensor_flatten__")


def parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that hold a weight: integers first, then scales and zero points; a plain tensor is its own."""
    if not is_packed(tensor):
        yield tensor
        return
    packed: Any = tensor
    for name in packed.__tensor_flatten__()[0]:
        yield from parts(getattr(packed, name))


def numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds the numbers of a weight, without its scales."""
    return next(parts(tensor))


def rebuilt(tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a packed tensor like another, with every tensor inside changed; a plain one is changed itself."""
    if not is_packed(tensor):
        return change(tensor)
    packed: Any = tensor
    names, attributes = packed.__tensor_flatten__()
    inside = {name: rebuilt(getattr(packed, name), change) for name in names}
    made: torch.Tensor = type(packed).__tensor_unflatten__(inside, attributes, packed.shape, packed.stride())
    return made


_STORED = "_trainatomy_quantization"
_FLOATING = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
"""Names of dtypes in safetensors' headers."""
_LARGEST_HEADER = 100_000_000
"""Bytes of a header that safetensors itself accepts."""
_OLDEST_GPU = {"mxfp4": (7, 5), "fp8": (8, 9), "mxfp8": (8, 9)}
"""Compute capability below which transformers dequantises to 16 bits (quantizer_mxfp4.py, quantizer_finegrained_fp8.py,
5.17)."""


def is_dequantised(stored: Any, settings: Any) -> bool:
    """Return whether a script dequantises a checkpoint while it loads it.

    Args:
        stored: The checkpoint's own ``quantization_config``.
        settings: What the script passes to ``from_pretrained``.
    """
    contents = [_content(each) for each in (stored, settings) if each is not None]
    methods = {library_of(each) for each in contents}
    if stored is None or len(methods) > 1 or not methods <= set(DEQUANTISED):
        return False
    return bool(contents[-1].get("dequantize"))


def take(merged: dict[str, Any]) -> dict[str, Any] | None:
    """Remove how weights are stored from the content of a ``config.json`` and return it.

    ``null`` as an override removes the key and leaves the dense model.
    """
    found = [each for each in (merged.pop(key, None) for key in STORED_QUANTISED) if each]
    return (dict(found[0]) if isinstance(found[0], Mapping) else {}) if found else None


def remember(config: Any, settings: dict[str, Any] | None) -> None:
    """Keep with a configuration how its weights are stored."""
    if settings is not None:
        setattr(config, _STORED, settings)


def settings_of(config: Any) -> dict[str, Any] | None:
    """Return how the weights of a checkpoint are quantised, by its configuration, or ``None``."""
    return getattr(config, _STORED, None)


def stored_quantization(model: Any) -> dict[str, Any] | None:
    """Return how the weights of a model's checkpoint are quantised (bitsandbytes), or ``None``."""
    return settings_of(getattr(model, "config", None))


def dtype_of_files(folder: Path) -> str | None:
    """Return the dtype of the first weight in floating point of a checkpoint in a folder, as transformers does.

    Only the header of its first file is read; None without files in safetensors' format.
    """
    for file in sorted(folder.glob("*.safetensors"))[:1]:
        with file.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(size)) if size < _LARGEST_HEADER else {}
        kinds = (entry.get("dtype") for name, entry in header.items() if name != "__metadata__")
        return next((_FLOATING[kind] for kind in kinds if kind in _FLOATING), None)
    return None


def quantization_name(settings: Mapping[str, Any] | None) -> str | None:
    """Return the short name of how weights are stored, as of ``stored_quantization``: ``nf4``, ``int8``."""
    if settings is None:
        return None
    if settings.get("load_in_4bit"):
        return str(settings.get("bnb_4bit_quant_type", "fp4"))
    return "int8" if settings.get("load_in_8bit") else library_of(settings)


def check_stored(workload: Workload, config: Any) -> str | None:
    """Refuse weights that are not simulated; return a note for those that transformers dequantises.

    Raises:
        WorkloadError: Weights of this method are not simulated, or quantised once more.
    """
    settings, spec = settings_of(config), workload.model
    if spec.quantization is not None and spec.quantization.is_dequantised:
        settings = _dequantised(spec, spec.quantization.quant_method, settings)
    if settings is None:
        return None
    _check_quantised_twice(spec)
    method = _method(settings)
    if method == "bitsandbytes":
        return None
    why = _why_dequantised(workload, method, settings)
    if why is None:
        raise _refused(workload, method)
    delattr(config, _STORED)
    return (
        f"{_name(spec)} is stored quantised ({method}), and its weights are dequantised while it is loaded, {why}: "
        "what that takes while loading is not counted"
    )


def _dequantised(spec: ModelSpec, asked: str, settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return how weights are stored, with ``dequantize`` set; refuse those that another method stored."""
    found = "not stored quantised" if settings is None else f"stored quantised by {_method(settings)}"
    if settings is None or _method(settings) != asked:
        raise WorkloadError(
            f"model.quantization: {_name(spec)} is {found}, not by {asked}: leave model.quantization out",
            key="model.quantization",
        )
    return {**settings, "dequantize": True}


def _content(settings: Any) -> dict[str, Any]:
    """Return the content of a configuration of transformers, or of its part of a ``config.json``."""
    return dict(settings if isinstance(settings, Mapping) else vars(settings))


def library_of(arguments: Mapping[str, Any]) -> str:
    """Return the library that quantises weights, by the content of a ``quantization_config``."""
    method = arguments.get("quant_method")
    return str(getattr(method, "value", method) or "bitsandbytes")


def _method(settings: Mapping[str, Any]) -> str:
    """Return the method of quantisation."""
    has_bits = bool(settings.get("load_in_4bit") or settings.get("load_in_8bit"))
    named = str(settings.get("quant_method") or ("bitsandbytes" if has_bits else "an unnamed method"))
    if named.startswith("bitsandbytes"):
        return "bitsandbytes" if has_bits else "bitsandbytes without load_in_4bit or load_in_8bit"
    return named


def _why_dequantised(workload: Workload, method: str, settings: Mapping[str, Any]) -> str | None:
    """Return why transformers dequantises weights, None where it keeps them packed."""
    if method in DEQUANTISED and settings.get("dequantize"):
        return "as the configuration says"
    gpu = workload.resolve_gpu()
    if gpu.capability < _OLDEST_GPU.get(method, (0, 0)):
        return f"because {gpu.name} has no kernels for it"
    missing = [each for each in ("triton", "kernels") if version_of(each) is None]
    if method == "mxfp4" and missing:
        return f"because {' and '.join(missing)} cannot be imported here (where they can, weights stay packed)"
    if gpu.is_amd:
        raise WorkloadError(f"weights stored quantised ({method}) are not simulated on AMD GPUs", key="gpu")
    return None


def _check_quantised_twice(spec: ModelSpec) -> None:
    """Refuse ``load_in_4bit`` for weights that are stored quantised."""
    if spec.quantization is not None and spec.quantization.is_set:
        raise WorkloadError(
            f"model.quantization: {_name(spec)} is stored quantised already, and transformers keeps that: leave "
            "load_in_4bit and load_in_8bit out, or set model.config.quantization_config: null",
            key="model.quantization",
        )


def _refused(workload: Workload, method: str) -> WorkloadError:
    """Return the error for weights that are not simulated."""
    kernels = f", by {LIBRARIES[method]}" if method in LIBRARIES else ""
    dense = "null to predict the dense model"
    if method in DEQUANTISED:
        dense = f"{{dequantize: true}} to predict weights that are dequantised while loading, or {dense}"
    return WorkloadError(
        f"model.config.quantization_config: {_name(workload.model)} is quantised ({method}{kernels}), and weights that "
        "are stored packed are simulated for bitsandbytes only: name a checkpoint that is not quantised, or set "
        f"model.config.quantization_config: {dense}",
        key="model.config.quantization_config",
    )


def _name(spec: ModelSpec) -> str:
    return str(spec.id or spec.class_)
