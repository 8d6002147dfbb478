"""Models that accelerate's hooks spread over GPU and host (``device_map``, ``max_memory``, ``cpu_offload``).

The hooks are accelerate's own: weights on the host are copied to the GPU for the forward pass of their layer, and stay
there as long as autograd needs them.  Between uses a module holds tensors of the meta device, which nothing can move
(accelerate 1.15, hooks.py and big_modeling.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from trainatomy.errors import SimulationError
from trainatomy.scripts.imports import replace_everywhere
from trainatomy.scripts.job import current_place
from trainatomy.scripts.standins.notes import StandIns

_NOT_TRAINED = (
    "accelerate's hooks (device_map, cpu_offload) copy weights of the host to the GPU anew in each forward pass: "
    "their gradients are computed and lost, so that they are not trained"
)


def install(stand_ins: StandIns) -> None:
    """Put it in place when accelerate's hooks are imported."""
    stand_ins.when("accelerate.hooks", partial(_follow_hooks, stand_ins))
    stand_ins.when("accelerate.big_modeling", partial(_tell_weights_apart, stand_ins))


def has_gpu_hooks(model: torch.nn.Module) -> bool:
    """Return whether hooks bring weights of a model to the GPU when it is called; between calls all may be away."""
    devices = (getattr(getattr(module, "_hf_hook", None), "execution_device", None) for module in model.modules())
    return any(isinstance(device, int) or str(device).startswith("cuda") for device in devices)


def _follow_hooks(stand_ins: StandIns, hooks: Any) -> None:
    """Let what hooks leave in a module have no data, and what they bring to the GPU be weights."""
    place, process = hooks.set_module_tensor_to_device, stand_ins.process

    def set_tensor(module: Any, tensor_name: str, device: Any, *rest: Any, **options: Any) -> None:
        place(module, tensor_name, device, *rest, **options)
        owner, _, name = tensor_name.rpartition(".")
        tensors = module.get_submodule(owner)
        tensors = tensors._parameters if name in tensors._parameters else tensors._buffers
        with torch._C.DisableTorchFunction():
            tensor = tensors[name]
            if str(device) == "meta":
                tensors[name] = _without_data(stand_ins, tensor)
            elif tensor.is_meta and process.storages.on_device(tensor):
                process.recorder.label(tensor, "weight", again=True)
                is_fetched = options.get("value") is not None and torch.is_grad_enabled()
                if is_fetched and tensor.requires_grad and _NOT_TRAINED not in process.notes:
                    process.notes.append(_NOT_TRAINED)

    stand_ins.put(hooks, "set_module_tensor_to_device", set_tensor)


def _without_data(stand_ins: StandIns, tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the meta device like another one, whose storage may be that of the weight on the host."""
    storages = stand_ins.process.storages
    with _disable_current_modes():
        made = torch.empty_like(tensor.detach(), device="meta")
    storages.mark_host([made], takes_memory=False)
    storages.take_data(made)
    return torch.nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else made


def _tell_weights_apart(stand_ins: StandIns, big_modeling: Any) -> None:
    """Let tensors have addresses from the first dispatch on, by which hooks find tied weights again."""

    def addressed(original: Any) -> Any:
        def dispatch(*arguments: Any, **options: Any) -> Any:
            stand_ins.process.functions.handle({torch.Tensor.data_ptr: _address})
            return original(*arguments, **options)

        return dispatch

    for name in ("dispatch_model", "cpu_offload"):
        original = getattr(big_modeling, name)
        stand_ins.put(big_modeling, name, addressed(original))
        replace_everywhere(stand_ins.stack, [(original, getattr(big_modeling, name))])


def _address(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return the address of a tensor: of one without data, by that of its storage."""
    (tensor,) = args
    with torch._C.DisableTorchFunction():
        if not tensor.is_meta:
            return int(func(tensor))
        return tensor.untyped_storage().data_ptr() + tensor.storage_offset() * tensor.itemsize


def spread(stand_ins: StandIns, model: torch.nn.Module, options: dict[str, Any]) -> None:
    """Put the modules of a model that was built on the host where ``from_pretrained`` would, by transformers' own map.

    Raises:
        SimulationError: The map puts modules on disk.
    """
    from transformers.integrations import accelerate as placing

    given = placing.check_and_set_device_map(options["device_map"])
    found = placing._get_device_map(model, given, options.get("max_memory"), None)
    places = {str(place) for place in found.values()}
    if "disk" in places:
        on_disk = ", ".join([name for name, place in found.items() if place == "disk"][:3])
        raise SimulationError(
            f"{current_place(stand_ins.script) or 'the script'}: device_map puts modules on disk ({on_disk}, …), where "
            "this machine's memory, or max_memory, ends: offloading to disk is not simulated.\n"
            "Give max_memory with more for the CPU"
        )
    for name, place in found.items():
        if str(place) != "cpu":
            _moved(model, name, place)
    if len(places) > 1:
        buffers = bool(options.get("offload_buffers", False))
        placing.accelerate_dispatch(model, None, found, options.get("offload_folder"), None, buffers)
        model.hf_device_map = found


def _moved(model: torch.nn.Module, name: str, place: Any) -> None:
    """Move a module, or a parameter or buffer of one, to a GPU."""
    device = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    owner, _, last = name.rpartition(".")
    parent: Any = model.get_submodule(owner)
    part = getattr(parent, last) if last else parent
    if isinstance(part, torch.nn.Module):
        part.to(device)
    else:
        part.data = part.data.to(device)
