"""Releases of libraries that behave otherwise than those installed, and names that they left behind.

Behaviour of the libraries of January 2022 that kept more memory: PyTorch before 1.11 and transformers 4.15.

Softmax saved its input.  Up to PyTorch 1.10 the backward of ``softmax`` and ``log_softmax`` was written in terms of
their input although it computes with the output alone, so that autograd kept both; since 1.11 it takes the input's
dtype instead (https://github.com/pytorch/pytorch/issues/64000, https://github.com/pytorch/pytorch/pull/65242;
transformers distinguishes the two by ``is_torch_less_than_1_11``).  In attention that is one more [B, H, S, S] tensor
for each layer.

Attention always had a mask.  BERT of transformers 4.15 made a mask of ones where a batch had none, and added it to the
scores as fp32 zeros [B, 1, 1, S]: under autocast the sum, and so what softmax saved, was in fp32.

Notes where another release of PyTorch is simulated than the installed one, whose Python runs all the same.

Tensor types of old code, ``torch.cuda.FloatTensor(...)``, which a build without CUDA has only by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd import Function

from trainatomy.catalog.versions import Version, behaviour, parse_version, python_changes, version_text
from trainatomy.results.prediction import LeadingNote, fsdp_version
from trainatomy.simulator.driver import CurrentDevice
from trainatomy.workload.schema import Workload

_aten = torch.ops.aten


def functions_of(torch_version: tuple[int, int]) -> dict[Any, Callable[..., Tensor]]:
    """Return functions that saved more memory in ``torch_version`` than today, by the builtin that Python calls."""
    if not behaviour("softmax_saves_its_input", torch_version):
        return {}
    soft = _saving_input(_aten._softmax, _aten._softmax_backward_data)
    log = _saving_input(_aten._log_softmax, _aten._log_softmax_backward_data)
    return {
        **dict.fromkeys((torch.softmax, Tensor.softmax), soft),
        **dict.fromkeys((torch.log_softmax, Tensor.log_softmax), log),
    }


def _saving_input(forward: Any, backward: Any) -> Callable[..., Tensor]:
    """Return a softmax that saves its input beside its output; ``forward`` and ``backward`` are its kernels."""

    class SavingInput(Function):
        """Softmax that saves its input and output and uses only the output in backward."""

        @staticmethod
        def forward(ctx: Any, input: Tensor, dim: int, to_float: bool) -> Tensor:
            """Compute softmax over ``dim``; with ``to_float`` from float16 to float32 in one kernel."""
            output: Tensor = forward(input, dim, to_float)
            ctx.save_for_backward(input, output)
            ctx.dim = dim
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
            """Return the gradient of the input, in its dtype."""
            input, output = ctx.saved_tensors
            return backward(gradients[0], output, ctx.dim, input.dtype), None, None

    def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        to_float = input.dtype == torch.float16 and dtype == torch.float32
        if dtype is not None and not to_float:
            input = input.to(dtype)
        return SavingInput.apply(input, dim, to_float)

    return softmax


@contextlib.contextmanager
def software_of(era: str | None) -> Iterator[None]:
    """Let transformers behave as in ``era`` inside the block; None is today."""
    if era is None:
        yield
        return
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    with mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, eager=attention_of_2022):
        yield


def attention_of_2022(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Compute eager attention as BERT of transformers 4.15 did.

    Args:
        module: Attention layer.
        query: [B, H, S, D].
        key: [B, H, T, D].
        value: [B, H, T, D].
        attention_mask: Additive mask; zeros [B, 1, 1, T] if None.
        scaling: Factor of the scores, by default 1 / sqrt(D).
        dropout: Probability of dropping an attention weight.
        **options: Ignored.

    Returns:
        Output [B, S, H, D] and attention weights [B, H, S, T].
    """
    if attention_mask is None:
        attention_mask = torch.zeros((query.shape[0], 1, 1, key.shape[2]), dtype=torch.float32, device=query.device)
    scores = query @ key.transpose(-1, -2)
    scores = scores * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = scores + attention_mask
    probabilities = nn.functional.softmax(scores, dim=-1)
    probabilities = nn.functional.dropout(probabilities, p=dropout, training=module.training)
    return (probabilities @ value).transpose(1, 2).contiguous(), probabilities


def python_part_notes(workload: Workload) -> Iterator[str]:
    """Yield a note on the parts of PyTorch written in Python that a training runs in another release than asked for."""
    wanted = parse_version(workload.software.torch or torch.__version__)
    return part_notes(wanted, tuple(python_parts(workload)))


def part_notes(wanted: Version, parts: tuple[str, ...]) -> Iterator[str]:
    """Yield a note on parts of PyTorch that run as installed; one below the headline for each change that is known."""
    installed = parse_version(torch.__version__)
    if wanted == installed or not parts:
        return
    asked, here = version_text(wanted), version_text(installed)
    yield (
        f"software.torch: {asked} decides what PyTorch's operators, its allocator and cuBLAS do; {' and '.join(parts)} "
        f"{'runs' if len(parts) == 1 else 'run'} as in PyTorch {here}, which is installed here: to predict those of "
        f"{asked}, install it"
    )
    for change in python_changes(wanted, installed):
        if change.part in parts:
            yield LeadingNote(
                f"{change.part} is simulated as in PyTorch {here}: PyTorch {version_text(change.since)} changed it "
                f"({change.what}; {change.source})"
            )


def python_parts(workload: Workload) -> Iterator[str]:
    """Yield the parts of PyTorch, written in Python, that decide what a training allocates and launches."""
    parallel, train = workload.parallel, workload.train
    if workload.mode != "training":
        return
    if parallel.strategy == "fsdp2" or (train.fsdp and fsdp_version(train.fsdp_config) == 2):
        yield "FSDP2"
    if parallel.strategy == "fsdp1" or (train.fsdp and fsdp_version(train.fsdp_config) == 1):
        yield "FSDP1"
    if parallel.tp_size > 1 or parallel.cp_size > 1:
        yield "DTensor"
    if parallel.pp_size > 1:
        yield "pipelining"
    if parallel.strategy == "zero1":
        yield "ZeroRedundancyOptimizer"
    if train.gradient_checkpointing:
        yield "checkpointing"


_CPU_TYPES = (
    "FloatTensor", "DoubleTensor", "HalfTensor", "BFloat16Tensor", "LongTensor", "IntTensor", "ShortTensor",
    "CharTensor", "ByteTensor", "BoolTensor",
)  # fmt: skip


class LegacyType(type):
    """Type of the stand-ins for ``torch.cuda.FloatTensor`` and its kind: calls make tensors on the simulated GPU.

    Attributes:
        dtype: The dtype of its tensors.
    """

    dtype: torch.dtype
    device_of: Callable[[], torch.device]

    def __call__(cls, *arguments: Any, device: Any = None) -> torch.Tensor:
        """Make a tensor of a size, or from a list, an array or another tensor."""
        gpu = cls.device_of() if device is None else torch.device(device)
        first = arguments[0] if arguments else 0
        if len(arguments) == 1 and isinstance(first, torch.Tensor):
            return first.to(gpu, cls.dtype)
        if len(arguments) == 1 and not isinstance(first, int | torch.Size):
            return torch.tensor(first, dtype=cls.dtype).to(gpu)
        return torch.empty(*(arguments or (0,)), dtype=cls.dtype, device=gpu)

    def __instancecheck__(cls, instance: object) -> bool:
        """Return whether a tensor is on the GPU and of the dtype, as PyTorch's own types do."""
        return isinstance(instance, torch.Tensor) and instance.is_cuda and instance.dtype == cls.dtype


def install_legacy_types(stack: contextlib.ExitStack, current: CurrentDevice) -> None:
    """Put the types in place; ``stack`` undoes it."""

    def set_default(kind: Any) -> None:
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
        place, _, kind_name = name.rpartition(".")
        torch.set_default_dtype(getattr(torch, kind_name).dtype)
        torch.set_default_device(current.device if place == "torch.cuda" else "cpu")

    for name in _CPU_TYPES:
        content = {
            "dtype": getattr(torch, name).dtype,
            "device_of": staticmethod(lambda: current.device),
            "__module__": "torch.cuda",
        }
        stack.enter_context(mock.patch.object(torch.cuda, name, LegacyType(name, (), content)))
    stack.enter_context(mock.patch.object(torch, "set_default_tensor_type", set_default))
