"""Build the model of a workload with random weights.

The caller decides on which device: under ``torch.device("meta")`` a model of any size costs nothing; otherwise weights
are drawn on the CPU.  The result has the dtypes and buffers that ``from_pretrained`` would give it.

The layers of a model that make its logits: a score for each token of the vocabulary.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter, is_lazy

from trainatomy.errors import FactoryError, MissingLibrary, SimulationError, WorkloadError
from trainatomy.libraries import import_library
from trainatomy.training import factory
from trainatomy.training.configuration import DTYPES, build_configuration, dtype_note, dtype_to_load, stored_dtype
from trainatomy.training.host_values import call_with_values
from trainatomy.training.kernels import replace_layers
from trainatomy.training.model_class import embedding_class, head_note, model_class
from trainatomy.training.parts import excluded, frozen_parts, keep_of_frozen, without
from trainatomy.training.peft_methods import NOTES, adapt_by_method
from trainatomy.training.positions import lengths
from trainatomy.training.stored_weights import check_stored, stored_quantization
from trainatomy.workload.deepspeed import zero_stage
from trainatomy.workload.document import suggestion
from trainatomy.workload.loops import loop_of
from trainatomy.workload.model import UNSIMULATED_ATTENTION, LoraSpec, ModelSpec
from trainatomy.workload.preference import has_reference_model
from trainatomy.workload.sentence_transformers import is_of_sentence_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from trainatomy.workload.schema import Workload


def output_layers(model: nn.Module) -> list[str]:
    """Return the names of a model's layers that make logits.

    They are the output embeddings that transformers names, or else the last layer whose weight has the shape of the
    largest table of embeddings, which is that of the tokens.
    """
    named = dict(model.named_modules())
    known = {id(_named_by_transformers(module)) for module in named.values()}
    if found := [name for name, module in named.items() if id(module) in known]:
        return found
    shapes = {name: _shape(module) for name, module in named.items()}
    tables = [shapes[name] for name, module in named.items() if isinstance(module, nn.Embedding)]
    tokens = max(tables, key=lambda shape: shape[0], default=())
    return [name for name, module in named.items() if isinstance(module, nn.Linear) and shapes[name] == tokens][-1:]


def _shape(module: nn.Module) -> tuple[int, ...]:
    """Return the shape of a module's weight, () if it has none yet."""
    weight = getattr(module, "weight", None)
    return tuple(weight.shape) if isinstance(weight, torch.Tensor) and not is_lazy(weight) else ()


def _named_by_transformers(module: nn.Module) -> object:
    with suppress(NotImplementedError, AttributeError):  # models without text, and what is not yet built
        return module.get_output_embeddings()  # type: ignore[operator]
    return None


def around(name: str) -> list[str]:
    """Return the names of the modules that a layer lies in: "" for the model itself, and so on."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))]


def build_model(workload: Workload, *, trust_remote_code: bool = False) -> nn.Module:
    """Build the model of ``workload`` on the default device, and freeze or adapt it as the workload says.

    Where its weights are quantised, that comes later (``training.quantization.load_on_device``).

    Raises:
        WorkloadError: A name, a value or a length is wrong, or the checkpoint is quantised.
        NetworkError: The configuration cannot be fetched.
        MissingLibrary: peft or a library that the model needs is not installed.
        FactoryError: The user's ``model.factory`` failed.
        SimulationError: The model's attention kernels cannot run without a GPU.
    """
    spec = workload.model
    if spec.factory is not None:
        model = _from_factory(spec.factory, spec.factory_arguments)
    else:
        model = _from_transformers(workload, trust_remote_code)
        if workload.data.factory is None:
            lengths(workload, model)  # refuses sequences longer than the model's positions
    return model if is_quantised(workload, model) else adapt_and_freeze(model, workload)


def is_quantised(workload: Workload, model: nn.Module) -> bool:
    """Return whether the weights of a built model are quantised when it is loaded, and adapters added after that."""
    return workload.model.is_quantised or stored_quantization(unwrap(model)) is not None


def adapt_and_freeze(model: nn.Module, workload: Workload) -> nn.Module:
    """Add the adapters of a workload to a model, and freeze the parameters that it names."""
    spec, by_trl = workload.model, workload.mode == "training" and loop_of(workload).settings is not None
    frozen = frozen_parts(model, spec)
    keep_of_frozen(model, frozen, spec.frozen_tower)
    if spec.lora is not None:
        # TRL's trainers keep adapters in the dtype of the weights with ZeRO-3, which gathers both into one buffer.
        in_float32 = not (by_trl and zero_stage(workload.train.deepspeed) == 3)
        in_place = is_of_sentence_transformers(workload)
        model = _adapt(model, without(frozen, spec.lora), in_float32=in_float32, in_place=in_place)
    if spec.peft:
        notes = model_notes(model)
        left_out = {"exclude_modules": excluded(frozen, spec.peft.get("exclude_modules"))} if frozen else {}
        model = adapt_by_method(model, {**spec.peft, **left_out})
        add_notes(model, (*notes, *filter(None, [NOTES.get(str(spec.peft["peft_type"]).upper())])))
    _freeze(model, spec.freeze)
    _freeze_others(model, spec.freeze_except)
    if spec.enable_input_require_grads:
        _require_gradients_of_inputs(model)
    for name, parameter in model.named_parameters():
        if any(name.startswith(f"{part}.") for part in frozen):
            parameter.requires_grad_(False)
    if workload.mode == "training":
        replace_layers(model, unwrap(model), spec.kernels)
    return model


def cast_weights(model: nn.Module, workload: Workload, device: str, *, is_copied: bool = False) -> None:
    """Cast named weights and those that are trained as the workload says, on the GPU where they are not sharded.

    A model of which a copy serves as reference is cast once it has been copied.
    """
    wanted, named = workload.model.trainable_dtype, workload.model.float32_parameters
    if (wanted in (None, "auto") and not named) or (has_reference_model(workload) and not is_copied):
        return
    if workload.train.deepspeed is None and not workload.train.fsdp:
        model.to(device)
    kept = [each for name, each in model.named_parameters() if any(re.match(pattern, name) for pattern in named)]
    if named and not kept:
        message = f"model.float32_parameters: no parameter's name begins with a match of {', '.join(named)}"
        raise WorkloadError(message, key="model.float32_parameters")
    for parameter in kept:
        parameter.data = parameter.data.to(torch.float32)
    for parameter in model.parameters():
        if parameter.requires_grad and wanted not in (None, "auto"):
            parameter.data = parameter.data.to(DTYPES[wanted])


def model_notes(model: nn.Module) -> tuple[str, ...]:
    """Return what ``build_model`` decided for the user and a reader should know."""
    return getattr(unwrap(model), _NOTES, ())


def is_loaded_by_gpu(model: nn.Module) -> bool:
    """Return whether the GPU decided how the weights of a built model are loaded."""
    return getattr(unwrap(model), _LOADED_BY_GPU, False)


def stored_share(model: nn.Module) -> float:
    """Return the bytes of the stored weights of a built model for each byte in memory; 1 where nothing is cast."""
    inner = unwrap(model)
    stored = getattr(inner, _STORED, None)
    loaded = next((each.dtype for each in inner.parameters() if each.is_floating_point()), stored)
    return 1.0 if stored is None or loaded is None else stored.itemsize / loaded.itemsize


def weights_dtype(workload: Workload, model: nn.Module) -> torch.dtype:
    """Return the dtype of the weights of a built model: that of its first parameter if the checkpoint decides.

    A factory's model counts as float32.
    """
    spec = workload.model
    if spec.dtype != "auto":
        return DTYPES[spec.dtype]
    if spec.factory is not None:
        return torch.float32
    dtypes = (parameter.dtype for parameter in unwrap(model).parameters() if parameter.is_floating_point())
    return next(dtypes, torch.float32)


_NOTES = "_trainatomy_notes"
_LOADED_BY_GPU = "_trainatomy_loaded_by_gpu"
_STORED = "_trainatomy_stored_dtype"


def add_notes(model: nn.Module, notes: tuple[str, ...]) -> None:
    """Keep what was decided for the user with the model."""
    setattr(unwrap(model), _NOTES, notes)


def _from_factory(reference: str, arguments: Mapping[str, Any]) -> nn.Module:
    build = factory.load(reference, "model.factory")
    model = call_with_values(partial(factory.call, build, f"model.factory: {reference}", (), arguments))
    if not isinstance(model, nn.Module):
        raise FactoryError(f"model.factory: {reference} must return an nn.Module, not a {type(model).__name__}")
    if any(isinstance(parameter, UninitializedParameter) for parameter in model.parameters()):
        raise FactoryError(
            f"model.factory: {reference} returns a module with parameters without a shape (lazy modules): let the "
            "function run it on one batch first, so that it takes its shapes from that"
        )
    return model


def _from_transformers(workload: Workload, trust_remote_code: bool) -> PreTrainedModel:
    spec = workload.model
    config = build_configuration(spec, trust_remote_code=trust_remote_code)
    dtype, note = dtype_to_load(workload, config), dtype_note(workload, config)
    dequantised = check_stored(workload, config)
    if is_of_sentence_transformers(workload):
        found = embedding_class(config, spec.class_)
    else:
        found = model_class(config, spec.class_, trust_remote_code=trust_remote_code)
    _complete(config, found.__name__)
    _check_gradient_scaling(workload, dtype)
    _check_attention(spec.attn_implementation)
    attention = {} if spec.attn_implementation is None else {"attn_implementation": spec.attn_implementation}
    stored = stored_dtype(config)
    try:
        model = found._from_config(config, dtype=dtype, **attention)
    except ImportError as error:
        raise _missing(found.__name__, spec, error) from error
    except Exception as error:  # values that its configuration accepted and its layers do not
        raise WorkloadError(
            f"model: {found.__name__} cannot be built with this configuration: {type(error).__name__}: {error}",
            key="model",
        ) from error
    keep_in_float32(model, dtype)
    head = head_note(config, found, spec.class_) if workload.mode == "training" else None
    setattr(model, _NOTES, tuple(each for each in (head, note, dequantised) if each is not None))
    setattr(model, _LOADED_BY_GPU, dequantised is not None)
    setattr(model, _STORED, stored or dtype)
    return model


def _check_gradient_scaling(workload: Workload, dtype: torch.dtype) -> None:
    """Refuse fp16 training of float16 weights that the checkpoint decides (the schema sees only those it names)."""
    if workload.model.dtype == "auto" and dtype == torch.float16 and workload.cannot_unscale("float16"):
        raise WorkloadError(
            f"train.fp16: {workload.model.id or workload.model.class_} stores its weights in float16, and gradient "
            "scaling cannot unscale float16 gradients (PyTorch raises `Attempting to unscale FP16 gradients.`): set "
            "model.dtype: float32, or bf16 instead of fp16, or leave fp16 out",
            key="train.fp16",
        )


def _check_attention(name: str | None) -> None:
    """Refuse attention kernels that a model on meta tensors cannot run.

    A model on a real device is built: ``trainatomy measure`` needs no simulation of the kernel.
    """
    reason = "is a kernel from the hub" if "/" in (name or "") else None
    if name in UNSIMULATED_ATTENTION:
        reason = "calls the kernels of the flash-attn package"
    if reason is None or torch.get_default_device().type != "meta":
        return
    raise SimulationError(
        f"model.attn_implementation: {name} {reason}, which is not simulated: use sdpa, which runs PyTorch's own "
        "FlashAttention kernel in 16-bit precision if there is no attention mask, and like it never stores the "
        "matrix of attention scores"
    )


def _missing(class_name: str, spec: ModelSpec, error: ImportError) -> MissingLibrary:
    if (spec.attn_implementation or "").startswith("flash_attention"):
        return MissingLibrary(
            f"model.attn_implementation: {spec.attn_implementation} is not installed: pip install flash-attn, or use "
            "sdpa, which runs PyTorch's own FlashAttention kernel if it can",
            library="flash-attn",
        )
    return MissingLibrary(f"model: {class_name} needs a library that is not installed: {error}")


def _complete(config: PreTrainedConfig, class_name: str) -> None:
    """Set the attributes that a forward needs and a tokenizer or ``from_pretrained`` would set."""
    if class_name.endswith("ForSequenceClassification") and getattr(config, "pad_token_id", None) is None:
        end = getattr(config, "eos_token_id", None)
        config.pad_token_id = end[0] if isinstance(end, list) else end or 0
    if class_name in {"EncoderDecoderModel", "VisionEncoderDecoderModel", "SpeechEncoderDecoderModel"}:
        config.decoder.is_decoder = config.decoder.add_cross_attention = True
        if getattr(config, "pad_token_id", None) is None:
            config.pad_token_id = getattr(config.decoder, "pad_token_id", None) or 0
    if getattr(config, "is_encoder_decoder", False) and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    if class_name.startswith("Blip2") and getattr(config, "image_token_index", 0) is None:
        config.image_token_index = int(config.text_config.vocab_size) - 1


def keep_in_float32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Cast the parameters that must stay in float32 (T5's ``wo``, …), as ``from_pretrained`` does.

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


def _adapt(model: nn.Module, lora: LoraSpec, *, in_float32: bool, in_place: bool = False) -> nn.Module:
    """Add peft's low-rank adapters, which are in float32 by default even if the weights are in 16 bits.

    Args:
        model: The model.
        lora: Settings of the adapters.
        in_float32: Whether they are in float32.
        in_place: Whether transformers adds them, by ``add_adapter``, which leaves them in the dtype of the weights.
    """
    peft = import_library("peft", "model.lora")
    try:
        if in_place:
            cast("PreTrainedModel", model).add_adapter(peft.LoraConfig(**lora.arguments()))
            _cast_adapters(model)
            return model
        return peft.get_peft_model(model, peft.LoraConfig(**lora.arguments()), autocast_adapter_dtype=in_float32)
    except ImportError as error:
        raise MissingLibrary(f"model.lora: peft needs a library for this: {error}") from error
    except (LookupError, AttributeError, RuntimeError, TypeError, ValueError) as error:
        unnamed = " (all linear layers: `target_modules: all-linear`)" if "No `target_modules`" in str(error) else ""
        raise WorkloadError(f"model.lora: peft refuses: {error}{unnamed}", key="model.lora") from error


def _cast_adapters(model: nn.Module) -> None:
    """Cast adapters to the dtype of the weights beside them, which peft leaves out on meta tensors.

    Source: peft 0.21, tuners/tuners_utils.py (``_move_adapter_to_device_of_base_layer``).
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            dtype = next(layer.get_base_layer().parameters()).dtype
            for part in (getattr(layer, name, None) for name in layer.adapter_layer_names):
                if isinstance(part, nn.Module) and dtype.is_floating_point:
                    part.to(dtype)


def _freeze(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Exclude the parameters whose names match one of ``patterns`` (shell-style) from training."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not fnmatch.filter(names, pattern):
            raise WorkloadError(
                f"model.freeze: {pattern!r} matches no parameter{suggestion(pattern, names)}", key="model.freeze"
            )
    for name, parameter in model.named_parameters():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)


def _freeze_others(model: nn.Module, patterns: tuple[str, ...]) -> None:
    """Train the parameters alone whose names begin with a match of one of ``patterns`` (regular expressions)."""
    if not patterns:
        return
    for pattern in patterns:
        if not any(re.match(pattern, name) for name, _ in model.named_parameters()):
            raise WorkloadError(
                f"model.freeze_except: no parameter's name begins with a match of {pattern!r}; the first is "
                f"{next((name for name, _ in model.named_parameters()), 'none')}",
                key="model.freeze_except",
            )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(re.match(pattern, name) for pattern in patterns))


def _require_gradients_of_inputs(model: nn.Module) -> None:
    if not hasattr(model, "enable_input_require_grads"):
        raise WorkloadError(
            f"model.enable_input_require_grads: {type(unwrap(model)).__name__} has no such function: leave it out",
            key="model.enable_input_require_grads",
        )
    cast("PreTrainedModel", model).enable_input_require_grads()


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
    """Return the model inside peft's wrapper, or the model itself."""
    inner = getattr(model, "get_base_model", None)
    return inner() if inner is not None else model
