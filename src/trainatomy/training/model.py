"""Build the model of a workload, with random weights.

The caller decides where: under ``torch.device("meta")`` a model of any size costs nothing; without it, weights are
drawn on the CPU.  What is built is what ``from_pretrained(dtype=…)`` would load: the same dtypes, the same buffers.
"""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainatomy.errors import FactoryError, MissingLibrary, WorkloadError
from trainatomy.libraries import import_library
from trainatomy.training import factory
from trainatomy.training.classes import model_class
from trainatomy.training.configuration import build_configuration
from trainatomy.training.positions import lengths
from trainatomy.workload.nearest import suggestion

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from trainatomy.workload.model import LoraSpec, ModelSpec
    from trainatomy.workload.schema import Workload


def build_model(workload: Workload, *, trust_remote_code: bool = False) -> nn.Module:
    """The model of ``workload``: built, frozen or adapted as it says; on the device that is the caller's default.

    Raises ``WorkloadError`` (a name or a length is wrong), ``NetworkError``, ``MissingLibrary`` (peft),
    ``FactoryError`` (the user's ``model.factory`` raised).
    """
    spec = workload.model
    if spec.factory is not None:
        model = _from_factory(spec.factory)
    else:
        model = _from_transformers(spec, trust_remote_code)
        if workload.data.factory is None:
            lengths(workload.data, model)  # refuses sequences that are longer than the model's positions
    if spec.lora is not None:
        model = _adapt(model, spec.lora)
    _freeze(model, spec.freeze)
    return model


def _from_factory(reference: str) -> nn.Module:
    build = factory.load(reference, "model.factory")
    with factory.user_code(f"model.factory: {reference}"):
        model = build()
    if not isinstance(model, nn.Module):
        raise FactoryError(f"model.factory: {reference} must return an nn.Module, not a {type(model).__name__}")
    return model


def _from_transformers(spec: ModelSpec, trust_remote_code: bool) -> PreTrainedModel:
    config = build_configuration(spec, trust_remote_code=trust_remote_code)
    found = model_class(config, spec.class_, trust_remote_code=trust_remote_code)
    _complete(config, found.__name__)
    dtype = getattr(torch, spec.dtype)
    attention = {} if spec.attn_implementation is None else {"attn_implementation": spec.attn_implementation}
    try:
        model = found._from_config(config, dtype=dtype, **attention)
    except ImportError as error:
        raise _missing(found.__name__, spec, error) from error
    except Exception as error:  # values that its configuration took and its layers do not
        raise WorkloadError(
            f"model: {found.__name__} cannot be built with this configuration: {type(error).__name__}: {error}"
        ) from error
    keep_in_float32(model, dtype)
    return model


def _missing(class_name: str, spec: ModelSpec, error: ImportError) -> MissingLibrary:
    if (spec.attn_implementation or "").startswith("flash_attention"):
        return MissingLibrary(
            f"model.attn_implementation: {spec.attn_implementation} is not installed: pip install flash-attn, or use "
            "sdpa, which takes PyTorch's own flash kernel where it can"
        )
    return MissingLibrary(f"model: {class_name} needs a library that is not installed: {error}")


def _complete(config: PreTrainedConfig, class_name: str) -> None:
    """Special tokens without which a forward refuses to run, and which a tokenizer would otherwise bring."""
    if class_name.endswith("ForSequenceClassification") and getattr(config, "pad_token_id", None) is None:
        end = getattr(config, "eos_token_id", None)
        config.pad_token_id = end[0] if isinstance(end, list) else end or 0
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0


def keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Give the parameters that stay in float32 (T5's ``wo``, …) that dtype, as ``from_pretrained`` does when it loads.

    transformers matches its patterns anywhere in a parameter's name (``core_model_loading.py``,
    ``convert_and_load_state_dict_in_model``, 5.17).
    """
    patterns = [pattern.replace("*", ".*") for pattern in model._get_dtype_plan(dtype)]
    if not patterns:
        return
    kept = re.compile("|".join(patterns))
    for name, parameter in model.named_parameters():
        if kept.search(name):
            parameter.data = parameter.data.to(torch.float32)


def _adapt(model: nn.Module, lora: LoraSpec) -> nn.Module:
    """Low-rank adapters by peft, with its defaults: in float32 where the weights are in 16 bits."""
    peft = import_library("peft", "model.lora")
    try:
        return peft.get_peft_model(model, peft.LoraConfig(**lora.arguments()))
    except (ValueError, TypeError) as error:
        raise WorkloadError(f"model.lora: peft refuses: {error}") from error


def _freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Take the parameters whose names match one of ``patterns`` (as in a shell) out of training."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise WorkloadError(f"model.freeze: {pattern!r} matches no parameter{suggestion(pattern, names)}")
    for name, parameter in model.named_parameters():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)


def set_use_cache(model: nn.Module, use_cache: bool | None) -> None:
    """Set ``model.config.use_cache`` as the workload says; ``None`` leaves the model's own.

    The Trainer does this itself, with false as its default.  Raises ``WorkloadError`` if the model has no such setting.
    """
    if use_cache is None:
        return
    inner = unwrap(model)
    config = getattr(inner, "config", None)
    if config is None or not hasattr(config, "use_cache"):
        raise WorkloadError(
            f"train.use_cache: {type(inner).__name__} has no config.use_cache: leave the setting out",
            key="train.use_cache",
        )
    config.use_cache = use_cache


def unwrap(model: nn.Module) -> Any:
    """The model inside peft's wrapper, or the model itself."""
    inner = getattr(model, "get_base_model", None)
    return inner() if inner is not None else model
