"""Live modules: description as a workload, and a copy on meta tensors.

A model that is loaded inside the simulated process, as ``from_pretrained`` loads one with quantised weights.

Copies of bitsandbytes' layers on meta tensors, for live modules that hold them.

Their parameters carry what copying a tensor leaves out: scales and code books of quantised weights (``quant_state``,
``SCB``), and how weights are to be quantised when they are moved to a GPU.

Source: bitsandbytes 0.46-0.50, nn/modules.py and functional.py.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parameter import UninitializedParameter
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from trainatomy.errors import WorkloadError
from trainatomy.simulator.placement import META, names_cuda
from trainatomy.training.batch import MakeBatch
from trainatomy.training.stored_weights import rebuilt
from trainatomy.workload.arguments import check_keywords, path_of
from trainatomy.workload.schema import Workload


def is_quantised(parameter: nn.Parameter) -> bool:
    """Return whether a parameter is one of bitsandbytes' linear layers."""
    kind = type(parameter)
    return kind.__module__.startswith("bitsandbytes.") and kind.__name__ in ("Params4bit", "Int8Params")


def layer_on_meta(parameter: Any, memo: dict[int, Any]) -> nn.Parameter:
    """Return a copy of a quantised parameter without data, and note in ``memo`` what it holds, as ``deepcopy`` does."""
    empty = torch.empty_like(parameter.data, device="meta")
    memo[id(parameter.data)] = empty
    attributes = {name: value for name, value in vars(parameter).items() if name not in ("data", "module")}
    for name, value in attributes.items():
        if isinstance(value, torch.Tensor):  # CB is the weight itself
            shared = value.data_ptr() == parameter.data_ptr() and value.dtype == parameter.dtype
            attributes[name] = empty if shared else torch.empty_like(value, device="meta")
            memo[id(value)] = attributes[name]
    if attributes.get("quant_state") is not None:
        attributes["quant_state"] = _state(attributes["quant_state"], memo)
    copied: nn.Parameter = type(parameter)(empty, requires_grad=parameter.requires_grad)
    vars(copied).update(attributes)
    memo[id(parameter)] = copied
    return copied


def _state(state: Any, memo: dict[int, Any]) -> Any:
    """Return a copy of a ``QuantState`` without data."""
    copied = copy.copy(state)
    for name, value in vars(state).items():
        if isinstance(value, torch.Tensor):
            setattr(copied, name, torch.empty_like(value, device="meta"))
    if state.state2 is not None:
        copied.state2 = _state(state.state2, memo)
    memo[id(state)] = copied
    return copied


def memo_of_layers(model: nn.Module, memo: dict[int, Any]) -> None:
    """Note in ``memo`` what layers with 8-bit weights keep outside of their parameters."""
    for module in model.modules():
        state = vars(module).get("state")
        if type(state).__module__.startswith("bitsandbytes."):
            weight: Any = memo.get(id(module._parameters.get("weight")))
            for name, value in vars(state).items():
                if isinstance(value, torch.Tensor) and id(value) not in memo:
                    is_weight = name == "CB" and weight is not None
                    memo[id(value)] = weight.data if is_weight else torch.empty_like(value, device="meta")


def place(model: nn.Module) -> None:
    """Move a live model to the GPU as far as ``from_pretrained`` makes it there.

    That is a model that was loaded quantised, which the Trainer leaves where it is, and 8-bit weights with their
    scales, which ``nn.Module.to`` would leave behind.
    """
    _place_8bit(model)
    if any(vars(module).get("is_quantized") is True for module in model.modules()):
        nn.Module.to(model, "cuda")


def _place_8bit(model: nn.Module) -> None:
    for module in model.modules():
        weight = module._parameters.get("weight")
        if type(weight).__name__ == "Int8Params" and weight is not None and weight.dtype == torch.int8:
            module.weight = weight.to("cuda")
            state: Any = module.state
            state.CB = None if state.CB is None else module.weight.data
            state.SCB = None if state.SCB is None else state.SCB.to("cuda")


def name_layers(model: nn.Module) -> None:
    """Let the 4-bit weights of a copied model know their layers, which take the scales when they are quantised."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and hasattr(weight, "quant_storage"):
            vars(weight)["module"] = module


class HostTensors(TorchFunctionMode):
    """Lets every tensor that is made without a GPU's name be a meta tensor that stands for one in host memory.

    ``from_pretrained`` makes an empty model on ``meta`` and fills it; peft makes adapters on the CPU and moves them.
    Neither is in GPU memory, and neither needs values.

    Args:
        on_host: Context in which meta tensors that are made stand for tensors in host memory.
    """

    def __init__(self, on_host: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__()
        self._on_host = on_host
        self._makers = _device_constructors() - {torch.tensor, torch.as_tensor, torch.asarray}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in self._makers or names_cuda(kwargs.get("device")):
            return func(*args, **kwargs)
        with self._on_host():
            return func(*args, **{**kwargs, "device": META})


@contextlib.contextmanager
def loading(on_host: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Load a model in the block.

    Weights that are stored quantised are copied by several threads at once in a real
    process, which takes the same memory; here one copies them, because the simulation belongs to one thread.

    Args:
        on_host: Context in which meta tensors that are made stand for tensors in host memory.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict("os.environ", HF_DEACTIVATE_ASYNC_LOAD="1"))
        stack.enter_context(HostTensors(on_host))
        yield


_SECTIONS = frozenset(Workload.model_fields) - {"model", "train", "gpu"}
"""Keywords that are keys at the top of a workload; every other one is a setting of ``train``."""
_BATCH_SIZE = "per_device_train_batch_size"


def on_meta(model: nn.Module) -> nn.Module:
    """Copy ``model`` with meta tensors as parameters and buffers; ties between them are kept.

    The model itself is not touched.

    Raises:
        WorkloadError: The module cannot be copied, has parameters without a shape, or quantised weights.
    """
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        _check_parameter(model, name, parameter)
        if id(parameter) in memo:
            continue
        if is_quantised(parameter):
            layer_on_meta(parameter, memo)
        else:
            empty = rebuilt(parameter, lambda part: torch.empty_like(part, device="meta"))
            memo[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    memo_of_layers(model, memo)
    for buffer in model.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    for computed in _computed_attributes(model):
        memo[id(computed)] = torch.empty_like(computed, device="meta").detach()
    try:
        copied = copy.deepcopy(model, memo)
    except (RuntimeError, TypeError, ValueError) as error:
        raise WorkloadError(
            f"the module {type(model).__name__} cannot be copied ({error}); "
            "give a factory that builds it: model.factory"
        ) from error
    name_layers(copied)
    return copied


def _check_parameter(model: nn.Module, name: str, parameter: nn.Parameter) -> None:
    """Raise WorkloadError for a parameter that an empty tensor cannot stand for."""
    if isinstance(parameter, UninitializedParameter):
        raise WorkloadError(
            f"the module {type(model).__name__} has parameters without a shape (lazy modules): "
            "run it on one batch first, so that it takes its shapes from that"
        )
    kind = type(parameter)
    if kind.__module__.startswith("bitsandbytes.") and not is_quantised(parameter):
        raise WorkloadError(
            f"{name} of {type(model).__name__} is a {kind.__name__} of bitsandbytes, which is not simulated: only "
            "layers with 4-bit and 8-bit weights are.\nPredict the model without it, or measure it with "
            "trainatomy.measure"
        )


def _computed_attributes(model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield tensors that modules keep as plain attributes and compute from parameters before each forward.

    The weights of ``torch.nn.utils.weight_norm``, ``spectral_norm`` and ``prune`` are such tensors.
    """
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Tensor) and not value.is_leaf:
                yield value


def described(
    model: nn.Module,
    batch: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] | None,
    optimizer: str | type[torch.optim.Optimizer] | Callable[[Any], Any] | None,
    gpu: str | None,
    train: Mapping[str, Any],
) -> tuple[Workload, MakeBatch | None]:
    """Describe the training of a live module as a workload.

    Args:
        model: Module to train.
        batch: Batch, or function of the batch size that returns one; None for a transformers model.
        optimizer: Name of an optimizer, or its class.
        gpu: Id of the GPU.
        train: Other keywords: settings of ``train``, or sections of the workload.

    Returns:
        The workload, and what makes its batches (None: trainatomy makes them).

    Raises:
        WorkloadError: An argument has a wrong type, or batch and settings contradict each other.
    """
    _check_types(model, batch, optimizer)
    settings = dict(train)
    top = {key: settings.pop(key) for key in _SECTIONS if key in settings}
    if optimizer is not None:
        path = optimizer if isinstance(optimizer, str) else path_of(optimizer)
        settings["optim"] = path
    make_batch: MakeBatch | None = None
    if isinstance(batch, Mapping):
        on_host = _to_host(batch)
        settings.setdefault(_BATCH_SIZE, _batch_size(on_host))
        _check_rows(on_host, settings[_BATCH_SIZE], "the batch")
        make_batch = lambda size: on_host  # noqa: E731
    elif batch is not None:
        make_batch = _checked(batch)
    elif not hasattr(model, "config"):
        raise WorkloadError(
            f"a batch is needed to train {type(model).__name__}: "
            "pass batch={name: tensor}, or a function of the batch size"
        )
    section = {} if gpu is None else {"gpu": gpu}
    model_section = {"class": type(model).__name__, **_dtype(model)}
    mapping: dict[str, Any] = {"loop": "pytorch", **top, **section, "model": model_section, "train": settings}
    return Workload.from_mapping(mapping), make_batch


def _check_types(model: Any, batch: Any, optimizer: Any) -> None:
    """Raise WorkloadError for arguments that are often confused with the right ones."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise WorkloadError(
            f"predict got the class {model.__name__}, not a module: pass an instance, {model.__name__}(...)"
        )
    if isinstance(model, str) and model.endswith((".yaml", ".yml", ".json")):
        raise WorkloadError(
            f"predict got the path {model!r}: read it first, trainatomy.predict(trainatomy.read_workload({model!r}))"
        )
    if isinstance(model, str):
        raise WorkloadError(
            f"predict got the text {model!r}: pass a Workload, such as "
            f"Workload.from_mapping({{'model': {{'id': {model!r}}}}}), or a torch.nn.Module"
        )
    if not isinstance(model, nn.Module):
        raise WorkloadError(f"predict takes a Workload or a torch.nn.Module, not a {type(model).__name__}")
    check_keywords(batch, optimizer)


def applies_to(model: nn.Module, batch: object) -> Callable[[Mapping[str, object]], bool]:
    """Return which settings of a workload (keys with their values) change the prediction of a live module.

    A module is trained on one GPU, with the layers and the dtype that it has, and a batch that is given has its own
    length.
    """
    dtype = _dtype(model).get("dtype", "float32")

    def applies(key: str, value: object) -> bool:
        section = key.partition(".")[0]
        if section == "model":
            return key == "model.dtype" and value == dtype
        if section == "parallel":
            return False
        return section != "data" or batch is None

    return lambda settings: all(applies(key, value) for key, value in settings.items())


def check_permissions(allow: Collection[str], batch: object) -> None:
    """Raise WorkloadError if a search may change what a live module or a batch keeps."""
    if "lora" in allow:
        raise WorkloadError(
            "allow: lora: a module is trained with the layers that it has; add the adapters to it "
            "(peft.get_peft_model), or give a workload"
        )
    if "quantization" in allow:
        raise WorkloadError(
            "allow: quantization: a module is trained with the layers that it has; load it with a quantization_config, "
            "or give a workload"
        )
    if "sequence-length" in allow and batch is not None:
        raise WorkloadError(
            "allow: sequence-length: the batch has its length; leave the batch out, or pass a shorter one"
        )


def batches_of(batch: Mapping[str, Any] | Callable[[int], Mapping[str, Any]]) -> tuple[MakeBatch, int | None]:
    """Return a function that makes batches, and the number of their rows where it is fixed."""
    if isinstance(batch, Mapping):
        on_host = _to_host(batch)
        return lambda size: on_host, _batch_size(on_host)
    return _checked(batch), None


def resized(batch: Mapping[str, Any]) -> MakeBatch:
    """Return a function of the batch size that repeats or drops rows of a batch.

    Tensors without the batch's number of rows, and other values, are passed on as they are.
    """
    on_host = _to_host(batch)
    rows = _batch_size(on_host)

    def make_batch(size: int) -> dict[str, Any]:
        chosen = torch.arange(size) % rows

        def sized(value: Any) -> Any:
            is_batched = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == rows
            return value[chosen] if is_batched else value

        return {key: sized(value) for key, value in on_host.items()}

    return make_batch


def _checked(make: Callable[[int], Mapping[str, Any]]) -> MakeBatch:
    """Return a function that makes a batch with ``make`` and checks its size."""

    def make_batch(size: int) -> dict[str, Any]:
        batch = make(size)
        if not isinstance(batch, Mapping):
            raise WorkloadError(f"batch({size}) returned a {type(batch).__name__}, not a mapping of names to tensors")
        on_host = _to_host(batch)
        _check_rows(on_host, size, f"batch({size})")
        return on_host

    return make_batch


def _check_rows(batch: Mapping[str, Any], size: Any, what: str) -> None:
    """Raise WorkloadError if no tensor of a batch has ``size`` rows."""
    rows = _rows(batch)
    if rows and isinstance(size, int) and size not in rows:
        raise WorkloadError(
            f"{what} has {rows[0]} rows, but {_BATCH_SIZE} is {size}: "
            f"leave {_BATCH_SIZE} out, or pass a batch of {size} rows",
            key=f"train.{_BATCH_SIZE}",
        )


def _dtype(model: nn.Module) -> dict[str, str]:
    """Return the dtype of the first weight as a section of the workload, if it has 16 bits."""
    first = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {"dtype": str(first).removeprefix("torch.")} if first in (torch.float16, torch.bfloat16) else {}


def _to_host(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a batch to the host, tensors with their values.

    Those on meta have none.  Their whole numbers and bools are 1 here, a mask without padding and a token that every
    vocabulary has; others are 0.
    """

    def host(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.is_meta:
            is_whole = not (value.is_floating_point() or value.is_complex())
            return torch.full_like(value, int(is_whole), device="cpu")
        return value.detach().cpu()

    return {key: host(value) for key, value in batch.items()}


def _rows(batch: Mapping[str, Any]) -> list[int]:
    """Return the first dimension of each tensor."""
    return [int(value.shape[0]) for value in batch.values() if isinstance(value, torch.Tensor) and value.dim() > 0]


def _batch_size(batch: Mapping[str, Any]) -> int:
    rows = _rows(batch)
    if not rows:
        raise WorkloadError("the batch holds no tensor with a first dimension")
    return rows[0]
