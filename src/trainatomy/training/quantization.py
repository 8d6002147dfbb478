"""Load a model with quantised weights, by transformers' own ``from_pretrained`` and bitsandbytes or torchao.

The model of a workload is built with weights in 32 or 16 bits, as every other one.  Quantised, it is loaded again: its
weights are the checkpoint, and each one is copied to the GPU and quantised there before the next.  A checkpoint that is
stored quantised is quantised in host memory first, and copied to the GPU as it is.

Weights that stay in 16 or 32 bits although quantised ones were asked for, such as the experts of a mixture.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn

from trainatomy.errors import MissingLibrary, WorkloadError
from trainatomy.libraries import import_library, version_of
from trainatomy.results.prediction import LeadingNote
from trainatomy.training.model import adapt_and_freeze, add_notes, cast_weights, is_quantised, model_notes
from trainatomy.training.process import isolated_process_settings
from trainatomy.training.stored_weights import is_packed, library_of, parts, stored_quantization
from trainatomy.units import human_bytes, many
from trainatomy.workload.defaults import peft_prepares, says_checkpointing
from trainatomy.workload.quantization import outlier_columns
from trainatomy.workload.support import BETWEEN_SECTIONS, Features, table

if TYPE_CHECKING:
    import torch

    from trainatomy.workload.schema import Workload


_LARGE_SHARE = 0.2
"""Share of the bytes of all weights from which those that are not quantised are worth a note."""


@dataclass(frozen=True)
class UnquantisedWeights:
    """Parameters of one class of modules that are not quantised, and are a large share of a model.

    Attributes:
        module: Name of the class.
        parameters: The parameters.
        bytes: Bytes that they hold when the model is loaded.
        of_bytes: Bytes of all weights of the model at that time.
    """

    module: str
    parameters: Sequence[torch.Tensor]
    bytes: int
    of_bytes: int


def is_quantised_layer(module: nn.Module) -> bool:
    """Return whether a layer is one of bitsandbytes', or has a weight that torchao packed."""
    kinds = type(module).__mro__  # Lightning's layers are classes of its own
    return any(kind.__module__.startswith("bitsandbytes.") for kind in kinds) or is_packed(
        module._parameters.get("weight")
    )


def unquantised_weights(model: Any) -> tuple[UnquantisedWeights, ...]:
    """Return the weights of a loaded model that are not quantised, where they are a large share of it.

    Embeddings and output layers are left out: no library quantises them.
    """
    whole = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
    by_module: dict[str, list[torch.Tensor]] = {}
    for module in model.modules():
        if not (is_quantised_layer(module) or isinstance(module, nn.Embedding) or id(module) in whole):
            whole_ones = (each for each in module.parameters(recurse=False) if not hasattr(each, "quant_state"))
            by_module.setdefault(type(module).__name__, []).extend(whole_ones)
    total = _bytes(model.parameters())
    found = (UnquantisedWeights(name, group, _bytes(group), total) for name, group in by_module.items())
    return tuple(each for each in found if each.bytes > _LARGE_SHARE * total)


def unquantised_notes(model: Any, found: Iterable[UnquantisedWeights]) -> Iterator[str]:
    """Yield a note on each class of modules whose weights were left as they were, once the model is prepared."""
    method = model.config.quantization_config.quant_method
    for each in found:
        held, kind = _bytes(each.parameters), str(each.parameters[0].dtype).removeprefix("torch.")
        note = (
            f"{human_bytes(each.bytes)} of the {human_bytes(each.of_bytes)} of weights are not quantised: they are "
            f"parameters of {each.module}, and {getattr(method, 'value', method)} quantises the weights of linear "
            "layers only (transformers 5 keeps all experts of a layer in one parameter)"
        )
        if held > each.bytes:
            note += (
                f". peft's prepare_model_for_kbit_training casts them to {kind} ({human_bytes(held)}); "
                "model.quantization.prepare_model_for_kbit_training: false leaves them"
            )
        yield LeadingNote(note)


def _bytes(parameters: Iterable[torch.Tensor]) -> int:
    return sum(part.nbytes for parameter in parameters for part in parts(parameter))


_PURPOSE = "model.quantization"


def load_on_device(workload: Workload, model: nn.Module, device: str) -> nn.Module:
    """Return the model to run: with weights on ``device`` if they are quantised or cast there, else ``model``.

    Args:
        workload: Training or inference to run.
        model: Its model, as ``build_model`` returns it.
        device: ``"cuda"`` or ``"cpu"``.

    Raises:
        WorkloadError: transformers or peft refuse a setting.
        MissingLibrary: bitsandbytes or accelerate is missing or too old.
    """
    if not is_quantised(workload, model):
        cast_weights(model, workload, device)
        return model
    problems = list(table()[BETWEEN_SECTIONS]["Quantised weights"].problems(Features(workload)))
    if problems:
        raise WorkloadError("\n".join(map(str, problems)), key=".".join(map(str, problems[0].path)))
    stored = stored_quantization(model)
    wanted = _wanted(workload) if stored is None else stored
    spec = workload.model.quantization
    experts = spec is not None and spec.bnb_4bit_experts and stored is None
    with isolated_process_settings(), _packing_experts(wanted) if experts else nullcontext():
        quantised = load_quantised(model, wanted, device, stored=stored is not None)
    if experts and not _packed_experts(quantised):
        key = f"{_PURPOSE}.bnb_4bit_experts"
        raise WorkloadError(f"{key}: {type(model).__name__} has no experts in one parameter: leave it out", key=key)
    _check_trainable(workload, quantised)
    unquantised = unquantised_weights(quantised)
    notes = list(_prepare(workload, quantised)) if peft_prepares(workload) else []
    notes += [*unquantised_notes(quantised, unquantised), *model_notes(model)]
    adapted = adapt_and_freeze(quantised, workload)
    cast_weights(adapted, workload, device)
    add_notes(adapted, (*notes, *quantisation_notes(quantised, outlier_columns(workload))))
    return adapted


@contextmanager
def _packing_experts(arguments: Mapping[str, Any]) -> Iterator[None]:
    """Quantise experts that are one parameter as soon as they are on the GPU.

    A packed parameter keeps how it was quantised, as bitsandbytes' own do.
    Source: axolotl 0.19, monkeypatch/moe_quant.py (``patch_moe_quantization_on_load``).
    """
    loading = import_library("transformers.core_model_loading", _PURPOSE)
    pack = import_library("bitsandbytes.nn.parametrize", _PURPOSE).replace_parameter_4bit
    place = loading.set_param_for_module

    def placed(model: nn.Module, target_name: str, param_value: torch.Tensor, *others: Any, **named: Any) -> None:
        place(model, target_name, param_value, *others, **named)
        path, _, name = target_name.rpartition(".")
        if param_value.ndim < len("GKN") or "expert" not in target_name.lower():
            return
        module = model.get_submodule(path)
        pack(
            module,
            name,
            compress_statistics=bool(arguments.get("bnb_4bit_use_double_quant")),
            quant_type=arguments.get("bnb_4bit_quant_type", "fp4"),
        )
        packed: Any = module.parametrizations[name]  # type: ignore[index]
        packed.original.quant_state = packed[0].quant_state
        param_value.data = torch.empty(0, device="cpu")
        torch.cuda.empty_cache()

    modeling = import_library("transformers.modeling_utils", _PURPOSE)
    with (
        mock.patch.object(loading, "set_param_for_module", placed),
        mock.patch.object(modeling, "caching_allocator_warmup", lambda *_, **__: None),  # of experts in 16 bits
    ):
        yield


def _packed_experts(model: nn.Module) -> int:
    """Return how many parameters of experts are packed; those of linear layers are bitsandbytes' own classes."""
    return sum(hasattr(each, "quant_state") and type(each) is nn.Parameter for each in model.parameters())


def _check_trainable(workload: Workload, model: Any) -> None:
    """Refuse to train what transformers' Trainer refuses, with adapters too.

    Raises:
        WorkloadError: It does.
    """
    if workload.mode == "training" and not model.hf_quantizer.is_trainable:
        method = model.hf_quantizer.quantization_config.quant_method.value
        raise WorkloadError(
            f"{_PURPOSE}: transformers does not train weights that {method} quantised in this way: ask for "
            "mode: inference, or choose another quantisation",
            key=_PURPOSE,
        )


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Load without transformers' progress bar."""
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def parameter_count(parameter: torch.Tensor) -> int:
    """Return how many weights a parameter holds, which packed 4-bit weights do not say themselves."""
    state = getattr(parameter, "quant_state", None)
    return parameter.numel() if state is None else int(state.shape.numel())


def scales(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield what quantised layers hold besides their weights: scales, offsets and code books."""
    for module in model.modules():
        weight = module._parameters.get("weight")  # an attribute may be computed when it is read
        for packed in module._parameters.values():
            state = getattr(packed, "quant_state", None)
            while state is not None:
                yield from (each for each in (state.absmax, state.offset, state.code) if each is not None)
                state = state.state2
        for holder in (weight, vars(module).get("state")):
            scale = getattr(holder, "SCB", None)
            if scale is not None:
                yield scale
        if weight is not None and is_packed(weight):
            _, *scales_of_weight = parts(weight)
            yield from scales_of_weight


def quantization_of(model: Any) -> str | None:
    """Return the short name of how layers of a loaded model are quantised (``nf4``), ``None`` if none are.

    The layers tell, as the configuration may be missing, or a dictionary; it tells of weights that FSDP has packed.
    """
    weights = [layer._parameters.get("weight") for layer in model.modules() if is_quantised_layer(layer)]
    if not weights:
        return None
    if (packed := next(filter(is_packed, weights), None)) is not None:
        return type(_setting(model, "quant_type") or packed).__name__
    kinds = [kind for weight in weights if (kind := getattr(weight, "quant_type", None))]
    if not kinds and _setting(model, "load_in_4bit"):
        kinds = [_setting(model, "bnb_4bit_quant_type") or "fp4"]
    return str(kinds[0]) if kinds else "int8"


def _setting(model: Any, name: str) -> Any:
    """Return what the configuration of a model says of its quantisation; None if it does not."""
    settings = getattr(getattr(model, "config", None), "quantization_config", None)
    return settings.get(name) if isinstance(settings, Mapping) else getattr(settings, name, None)


def quantisation_notes(model: Any, share: float) -> Iterator[str]:
    """Yield what was decided for the user when the weights were quantised, with a share of outlier columns."""
    settings = model.config.quantization_config
    layers = sum(is_quantised_layer(module) for module in model.modules())
    if settings.quant_method == "torchao":
        kind = type(settings.quant_type).__name__
        yield f"{layers} linear layers have quantised weights ({kind}) by torchao {version_of('torchao')}"
        return
    version = version_of("bitsandbytes")
    four = settings.load_in_4bit
    double = " with double quantisation" if four and settings.bnb_4bit_use_double_quant else ""
    kind = f"{settings.bnb_4bit_quant_type}, 4 bits{double}" if four else "8 bits"
    experts = f" and {many(count, 'parameter')} of experts" if (count := _packed_experts(model)) else ""
    yield f"{layers} linear layers{experts} have quantised weights ({kind}) by bitsandbytes {version}"
    if not four and settings.llm_int8_threshold > 0:
        which = f"{share:.0%} of the columns of activations are" if share else "no activation is"
        yield (
            f"{which} assumed to reach llm_int8_threshold ({settings.llm_int8_threshold:g}); columns that do are "
            "multiplied in 16 bits, which takes more memory and time (model.quantization.llm_int8_outlier_columns: 1 "
            "is the most)"
        )


def quantising_libraries(workload: Workload, model: nn.Module) -> frozenset[str]:
    """Return the libraries that quantise weights of a model when it is loaded, or did so already."""
    found = {
        "torchao" if is_packed(module._parameters.get("weight")) else "bitsandbytes"
        for module in model.modules()
        if is_quantised_layer(module)
    }
    if is_quantised(workload, model):
        spec = workload.model.quantization
        found.add("bitsandbytes" if spec is None else spec.quant_method)
    return frozenset(found)


def _wanted(workload: Workload) -> dict[str, Any]:
    """Return the arguments of transformers' configuration of quantised weights that a workload names."""
    spec = workload.model.quantization
    if spec is None or not spec.is_set:
        raise WorkloadError(
            "model.quantization: names neither load_in_4bit nor load_in_8bit, and the checkpoint is not quantised",
            key=_PURPOSE,
        )
    if spec.quant_method == "torchao":
        skipped = None if spec.modules_to_not_convert is None else list(spec.modules_to_not_convert)
        return {"quant_method": "torchao", "quant_type": spec.quant_type, "modules_to_not_convert": skipped}
    return spec.arguments()


def load_quantised(model: Any, arguments: dict[str, Any], device: str, *, stored: bool) -> nn.Module:
    """Load a model that was built with weights in 16 or 32 bits again, with quantised weights.

    Args:
        model: The model; its weights are the checkpoint.
        arguments: Those of ``BitsAndBytesConfig`` or ``TorchAoConfig``.
        device: ``"cuda"`` or ``"cpu"``.
        stored: Whether the checkpoint is stored quantised.
    """
    import_library(library_of(arguments), _PURPOSE)
    import_library("accelerate", _PURPOSE)
    place = 0 if device == "cuda" else device
    with _without_progress_bars():
        if not stored:
            return _from_pretrained(model, _weights(model), _settings(arguments), place)
        in_host_memory = _from_pretrained(model, _weights(model), _settings(arguments), "cpu")
        return _from_pretrained(model, _weights(in_host_memory), _settings(arguments), place, is_stored=True)


def _torchao_type(named: Any) -> Any:
    """Return a configuration of torchao: by its name, by what ``config.json`` says of it, or as it is."""
    if isinstance(named, str):
        quantization: Any = import_library("torchao.quantization", _PURPOSE)
        return getattr(quantization, named)()
    if not isinstance(named, Mapping):
        return named
    try:
        return import_library("torchao.core.config", _PURPOSE).config_from_dict(named.get("default", named))
    except (KeyError, TypeError, ValueError, AssertionError) as error:
        raise WorkloadError(f"{_PURPOSE}.quant_type: torchao refuses it: {error}", key=_PURPOSE) from error


def _settings(arguments: dict[str, Any]) -> Any:
    """Return a ``BitsAndBytesConfig`` or ``TorchAoConfig``."""
    from transformers import BitsAndBytesConfig, TorchAoConfig

    if library_of(arguments) == "torchao":
        return TorchAoConfig(_torchao_type(arguments["quant_type"]), arguments.get("modules_to_not_convert"))
    return BitsAndBytesConfig.from_dict(arguments)


def _weights(model: Any) -> dict[str, Any]:
    """Return the tensors that a checkpoint of the model has: a tied weight is stored once."""
    tied = getattr(model, "all_tied_weights_keys", {})
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}


def _from_pretrained(
    model: Any, weights: dict[str, Any], settings: Any, place: int | str, *, is_stored: bool = False
) -> nn.Module:
    """Load ``weights`` into a model like ``model``.

    Args:
        model: Model whose class, configuration and dtype it has.
        weights: Content of its checkpoint.
        settings: How its weights are quantised.
        place: Index of a GPU, or ``"cpu"``.
        is_stored: Whether ``weights`` are quantised already.
    """
    config = copy.deepcopy(model.config)
    if is_stored:
        config.quantization_config = settings.to_dict()
    quantise = {} if is_stored else {"quantization_config": settings}
    try:
        loaded: nn.Module = type(model).from_pretrained(
            None, config=config, state_dict=weights, dtype=config.dtype, device_map={"": place}, **quantise
        )
    except ImportError as error:
        raise MissingLibrary(f"{_PURPOSE}: {error}") from error
    except (ValueError, TypeError) as error:
        raise WorkloadError(f"{_PURPOSE}: transformers refuses: {error}", key=_PURPOSE) from error
    return loaded


def _prepare(workload: Workload, model: nn.Module) -> Iterator[str]:
    """Prepare a quantised model for adapters, as scripts do before ``get_peft_model``; yield what peft decides."""
    peft = import_library("peft", "model.lora")
    train, is_said = workload.train, says_checkpointing(workload) or workload.mode != "training"
    kwargs = train.gradient_checkpointing_kwargs
    if not is_said and workload.parallel.world_size > 1:
        kwargs = {"use_reentrant": False}  # DDP refuses reentrant ones beside adapters
    try:
        peft.prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=train.gradient_checkpointing if is_said else True,
            gradient_checkpointing_kwargs=kwargs,
        )
    except ValueError as error:  # the model has none
        raise WorkloadError(
            "train.gradient_checkpointing: peft's prepare_model_for_kbit_training switches it on unless it is false, "
            f"and transformers refuses: {error}",
            key="train.gradient_checkpointing",
        ) from error
    if not is_said:
        how = " (with use_reentrant: false, as DDP needs)" if kwargs else ""
        yield LeadingNote(
            f"gradient checkpointing is on{how}, as peft's prepare_model_for_kbit_training switches it on by default; "
            "train.gradient_checkpointing: false (--no-gradient-checkpointing) leaves it off"
        )
