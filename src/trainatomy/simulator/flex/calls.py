"""Calls of ``torch.compile`` for FlexAttention, answered by functions that allocate what compiled code does.

Functions and modules that were compiled before the simulation: their compiler looks for a real GPU.

PyTorch is told to run them without compiling, and FlexAttention inside them answers as compiled code.

Source: torch 2.9-2.13, torch/_dynamo/eval_frame.py (``compile_wrapper``, ``_callback_from_stance``).

``flex_attention`` that nobody compiled: PyTorch's own functions in Python, which write all scores.

PyTorch runs them below autograd (``FlexAttentionAutogradOp``), which saves what they take and give.

Source: torch 2.9-2.13, torch/_higher_order_ops/flex_attention.py.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, BlockMask, create_block_mask, noop_mask
from torch.utils._python_dispatch import _disable_current_modes

from trainatomy.errors import SimulationError
from trainatomy.simulator.flex.attention import Kernel, parts_of_keys, run
from trainatomy.simulator.flex.block_mask import captured, create, kept_share

if TYPE_CHECKING:
    from trainatomy.simulator.process import SimulatedProcess


_MODULE = "torch._dynamo.eval_frame"
FLEX_ATTENTION = "torch.nn.attention.flex_attention"
_WRAPPER = "compile_wrapper"


@contextlib.contextmanager
def run_without_compiling(notes: list[str]) -> Iterator[None]:
    """Run what was compiled before as it is written; ``notes`` says which."""
    module: Any = sys.modules.get(_MODULE)
    if module is None or not hasattr(module, "_callback_from_stance"):
        yield
        return

    callback_of = module._callback_from_stance

    def no_callback(callback: Any) -> Any:
        function = _compiled_by(sys._getframe(1))
        if function is None:
            return callback_of(callback)
        if getattr(function, "__module__", "") != FLEX_ATTENTION:
            owner = getattr(function, "__self__", function)
            name = getattr(owner, "__name__", type(owner).__name__)
            note = f"{name} was compiled before the simulation: it ran eagerly, which usually holds more"
            if note not in notes:
                notes.append(note)
        return None

    with mock.patch.object(module, "_callback_from_stance", no_callback):
        yield


def wants_sums() -> bool | None:
    """Return whether the call of ``flex_attention`` that is running returns sums; None if it is not compiled."""
    frame: FrameType | None = sys._getframe(1)
    returns = False
    while frame is not None:
        if frame.f_code.co_name == "flex_attention" and frame.f_globals.get("__name__") == FLEX_ATTENTION:
            given = frame.f_locals
            returns = given["return_lse"] or bool(getattr(given["return_aux"], "lse", False))
        if _compiled_by(frame) is not None:
            return returns
        frame = frame.f_back
    return None


def _compiled_by(frame: FrameType) -> Any:
    """Return the function that a frame of the compiler's wrapper calls; None for any other frame."""
    is_wrapper = frame.f_code.co_name == _WRAPPER and frame.f_globals.get("__name__") == _MODULE
    return frame.f_locals.get("fn") if is_wrapper else None


_OPERATOR = "torch._higher_order_ops.flex_attention"


class Uncompiled(torch.autograd.Function):
    """``FlexAttentionAutogradOp`` without its dispatcher, which lets no recorder see what runs."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, *how: Any) -> Any:
        """Run ``sdpa_dense``; ``how``: the function of a score, the mask, the scale and options."""
        ctx.set_materialize_grads(False)
        out, sums, maxima = import_module(_OPERATOR).sdpa_dense(query, key, value, *how)
        ctx.mark_non_differentiable(maxima)
        lists = [each for each in how[1] if isinstance(each, Tensor)]
        ctx.save_for_backward(query, key, value, out, sums, maxima, *lists)
        ctx.how = how
        return out, sums, maxima

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Run ``sdpa_dense_backward``."""
        query, key, value, out, sums, *_ = ctx.saved_tensors
        score_mod, *how = ctx.how
        gradients = import_module(_OPERATOR).sdpa_dense_backward(
            query, key, value, out, sums, *grads[:2], score_mod, _joint(score_mod, query), *how, (), ()
        )
        return (*gradients[:3], None, None, None, None)


def _joint(score_mod: Any, query: Tensor) -> Any:
    """Return the derivative of ``score_mod`` as PyTorch traces it."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.enable_grad():
        indices = [torch.zeros((), dtype=torch.int, device="meta") for _ in range(4)]
        score = torch.zeros((), dtype=query.dtype, device="meta", requires_grad=True)
        return import_module(_OPERATOR).create_fw_bw_graph(score_mod, (score, *indices), ())[1]


_INNER = "_flex_attention_hop_wrapper"
"""The function that ``flex_attention`` compiles where nobody compiled it: with a backend that runs it eagerly."""
_TRANSFORMERS = "transformers.integrations.flex_attention"
_LARGE_BLOCK = 1 << 30
"""Size of the one block of a call without a mask (``_LARGE_SPARSE_BLOCK_SIZE``)."""
_SMALLEST_HEAD = 16
_MEASURED, _SPILLING_HEAD, _SPILLED_BYTES = (9, 0), 64, 2960
"""Capability, head size and stack of the kernel that spills registers.

On Hopper's GPUs Inductor gives 128 threads a block of 128 x 128 scores in 16 bits with heads of 64, and of 128 x 64 in
other cases (``h100_default_flex_config`` of torch/_inductor/template_heuristics/triton.py).  On an H200 (torch 2.11,
2026-11-24) the kernels of BERT and of a Llama with padding had 734 and 740 spills and a stack of 2,944 and 2,960 bytes;
a Qwen3 with heads of 128 held no more memory than without.  Without a tensor to read, no kernel needed a stack.
"""
_OPTIONS: Mapping[str, tuple[Any, ...]] = {
    "backend": ("inductor",),
    "mode": (None, "default", "max-autotune-no-cudagraphs"),
}
"""Values of arguments of ``torch.compile`` for which compiled code allocates the same; of others any."""
_COMPILER_OPTIONS: Mapping[str, tuple[bool, ...]] = {
    "max_autotune": (True, False),  # the mode "max-autotune-no-cudagraphs" is the first two
    "coordinate_descent_tuning": (True, False),
    "wrap_inductor_compiled_regions": (True, False),  # one operator for autograd and checkpointing
    "triton.cudagraphs": (False,),
}
"""The same for its ``options``, of which others are refused."""
ASSUMED_TIME = (
    "FlexAttention: its kernels have the efficiency of FlashAttention's at the blocks that the mask keeps, which is "
    "assumed and was not measured; the time to compile it is not counted; reserved memory is that of a first run: a "
    "later one finds the settings of its kernels on disk, does not try them, and may reserve more or less"
)
SPILLS = (
    "FlexAttention: the mask reads a tensor, as for padding, and its kernel needs more registers than a thread has. "
    "Local memory is counted as compiled for an H200 (torch 2.11); another release of Triton may need another amount"
)
MAY_SPILL = (
    "FlexAttention: the mask reads a tensor, as for padding. On this GPU the registers of its kernel were not "
    "measured: if they do not suffice, the process holds up to some 0.5 GiB more outside of PyTorch's allocator than "
    "is counted"
)


def compiled_attention(
    process: SimulatedProcess, function: Any, options: Mapping[str, Any]
) -> Callable[..., Any] | None:
    """Return what runs in a process in place of a function of FlexAttention that is compiled; None for any other."""
    return FlexCalls(process).replacement(function, options)


class FlexCalls:
    """FlexAttention of one simulated process."""

    def __init__(self, process: SimulatedProcess) -> None:
        self._process = process
        self._shares: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Answer ``torch.compile`` of FlexAttention's functions in the block; compile everything else as before."""
        compile_other = torch.compile

        def compile(model: Any = None, **options: Any) -> Any:
            found = self.replacement(model, options)
            return compile_other(model, **options) if found is None else found

        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch, "compile", compile))
            library: Any = sys.modules.get(_TRANSFORMERS)
            if library is not None:  # it keeps the compiled function for the whole process
                stack.enter_context(mock.patch.object(library.WrappedFlexAttention, "_instance", None))
            yield

    def replacement(self, function: Any, options: Mapping[str, Any]) -> Callable[..., Any] | None:
        """Return what runs in place of a compiled function; None if it is not FlexAttention's.

        Raises:
            SimulationError: It is compiled in a way that allocates differently.
        """
        if getattr(function, "__module__", "") != FLEX_ATTENTION:
            return None
        self._process.processor.need_cuda("FlexAttention")
        if function.__name__ == _INNER:
            return self._inner
        answers: dict[str, Callable[..., Any]] = {
            "flex_attention": self._attention,
            "create_block_mask": self._block_mask,
        }
        found = answers.get(function.__name__)
        if found is None or callable(options.get("backend")):
            return None
        refused = {
            name: options[name] for name, accepted in _OPTIONS.items() if options.get(name, accepted[0]) not in accepted
        }
        inner = options.get("options") or {}
        if other := {name: value for name, value in inner.items() if value not in _COMPILER_OPTIONS.get(name, ())}:
            refused["options"] = other
        for name, value in refused.items():
            raise SimulationError(
                f"torch.compile({function.__name__}, {name}={value!r}) is not simulated: leave {name} out"
            )
        return found

    # -- masks ---------------------------------------------------------------------------------------------------------

    def _block_mask(self, *args: Any, **kwargs: Any) -> Any:
        """Run a compiled ``create_block_mask``."""
        bound = inspect.signature(create_block_mask).bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        if given.get("compute_dq_write_order"):
            raise _refused("create_block_mask(compute_dq_write_order=True)", "leave it out")
        size = given["BLOCK_SIZE"]
        return create(
            given["mask_mod"],
            (given["B"] or 1, given["H"] or 1, given["Q_LEN"], given["KV_LEN"]),
            (size, size) if isinstance(size, int) else tuple(size),
            separates_full=given.get("separate_full_blocks", True),
            version=self._process.processor.torch_version,
            tuning=self._process.tuning,
        )

    def _kept(self, mask: Any) -> float:
        """Return the share of blocks that a mask keeps: all where it depends on unknown values."""
        if mask not in self._shares:
            share = kept_share(mask, self._process.recorder.values.of)
            if share is None:
                self._note(
                    "FlexAttention: a mask depends on values that are not known without a GPU; the time of its kernels "
                    "is that of all blocks"
                )
            self._shares[mask] = 1.0 if share is None else share
        return self._shares[mask]

    def _note(self, note: str) -> None:
        if note not in self._process.notes:
            self._process.notes.append(note)

    # -- attention -----------------------------------------------------------------------------------------------------

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any = None,
        block_mask: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        kernel_options: Any = None,
        *,
        return_aux: Any = None,
    ) -> Any:
        """Run a compiled ``flex_attention``."""
        if getattr(return_aux, "max_scores", False):
            raise _refused("AuxRequest(max_scores=True)", "leave it out")
        returns_sums = return_lse or bool(getattr(return_aux, "lse", False))
        block_mask = block_mask if block_mask is not None else self._empty_mask(query)
        out, sums = self._run(query, key, value, score_mod, block_mask, kernel_options or {}, returns_sums=returns_sums)
        if return_aux is not None:
            return out, AuxOutput(lse=sums, max_scores=None)
        return (out, sums) if return_lse else out

    def _run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any,
        mask: Any,
        options: Mapping[str, Any],
        *,
        returns_sums: bool,
    ) -> tuple[Tensor, Tensor | None]:
        _check(query, key, value, mask, options)
        _refuse_trained_captures(score_mod)
        tensors = [*captured(score_mod), *captured(mask.mask_mod)]
        lists = [each for each in mask.as_tuple(flatten=True) if isinstance(each, Tensor)]
        held = (*lists, *(tensor for _, tensor in tensors if tensor.is_cuda))
        processor = self._process.processor
        splits = options.get("BACKEND", "AUTO") != "TRITON" and not options.get("FORCE_USE_FLEX_ATTENTION", False)
        parts = parts_of_keys(query, value, mask.kv_indices.shape[1], processor.multiprocessors) if splits else 0
        self._note(ASSUMED_TIME)
        dtype = torch.get_autocast_dtype("cuda") if self._process.autocast.enabled else None
        if not parts and any(tensor.is_cuda and tensor.dim() > 0 for _, tensor in captured(mask.mask_mod)):
            self._count_local_memory(dtype or query.dtype, query.shape[-1])
        kernel = Kernel(
            processor,
            dtype,
            torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value)),
            returns_sums,
            held,
            self._kept(mask),
            parts,
            self._process.tuning,
        )
        return run(query, key, value, kernel)

    def _count_local_memory(self, dtype: torch.dtype, head: int) -> None:
        """Count the registers that the kernel for many queries lacks if its mask reads a tensor."""
        if self._process.processor.capability != _MEASURED:
            self._note(MAY_SPILL)
        elif dtype != torch.float32 and head == _SPILLING_HEAD:
            recorder = self._process.recorder
            recorder.stack_bytes = max(recorder.stack_bytes, _SPILLED_BYTES)
            self._note(SPILLS)

    def _empty_mask(self, query: Tensor) -> Any:
        """Return the mask of a call without one: a single block, whose lists compiled code makes itself."""
        number, index, of_column, row = (
            torch.empty((1,) * dimensions, dtype=torch.int32, device="cuda") for dimensions in (3, 4, 3, 4)
        )
        return BlockMask(
            seq_lengths=(1, 1),
            kv_num_blocks=number,
            kv_indices=index,
            full_kv_num_blocks=None,
            full_kv_indices=None,
            q_num_blocks=of_column,
            q_indices=row,
            full_q_num_blocks=None,
            full_q_indices=None,
            BLOCK_SIZE=(_LARGE_BLOCK, _LARGE_BLOCK),
            mask_mod=noop_mask,
        )

    # -- functions that nobody compiled --------------------------------------------------------------------------------

    def _inner(
        self, query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask: Any, scale: float, options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run the operator of an uncompiled ``flex_attention``: all scores are written."""
        if (returns_sums := wants_sums()) is not None:
            out, sums = self._compiled_inner(query, key, value, score_mod, mask, options, returns_sums)
            sums = query.new_empty(0) if sums is None else sums
            return out, sums, sums

        _refuse_trained_captures(score_mod)
        if self._process.autocast.enabled:
            dtype = torch.get_autocast_dtype("cuda")
            query, key, value = (each.to(dtype) for each in (query, key, value))
        arguments = (query, key, value, score_mod, mask, scale, options)
        out, sums, maxima = Uncompiled.apply(*arguments)
        return out, sums, maxima

    def _compiled_inner(
        self, query: Tensor, key: Tensor, value: Tensor, score_mod: Any, mask: Any, options: Any, returns_sums: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Run the operator inside of a function that was compiled before the process existed."""
        names = [f"{side}_{what}" for side in ("kv", "full_kv", "q", "full_q") for what in ("num_blocks", "indices")]
        lists = dict(zip(names, mask[2:10], strict=True))
        block_mask = BlockMask(seq_lengths=mask[:2], BLOCK_SIZE=mask[-3:-1], mask_mod=mask[-1], **lists)
        return self._run(query, key, value, score_mod, block_mask, options, returns_sums=returns_sums)


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Any, options: Mapping[str, Any]) -> None:
    """Refuse what compiled FlexAttention refuses, and what is not simulated."""
    if not query.dim() == key.dim() == value.dim() == 4:
        raise _refused(f"queries of {query.dim()} dimensions", "give queries, keys and values four dimensions")
    if min(query.shape[-1], value.shape[-1]) < _SMALLEST_HEAD:
        raise SimulationError(
            f"flex_attention needs heads of at least {_SMALLEST_HEAD}, found {min(query.shape[-1], value.shape[-1])}: "
            "use sdpa"
        )
    if query.shape[0] != key.shape[0]:
        raise _refused("one batch of keys for several of queries", "expand the keys")
    if options.get("BACKEND", "AUTO") not in ("AUTO", "TRITON"):
        raise _refused(f"kernel_options BACKEND={options['BACKEND']!r}", "leave it out")
    if mask.q_indices is None:
        raise _refused("a block mask without q_indices", "make it with create_block_mask")


def _refuse_trained_captures(score_mod: Any) -> None:
    """Refuse a ``score_mod`` whose backward scatters into gradients of tensors that it uses."""
    for name, tensor in captured(score_mod):
        if tensor.requires_grad and torch.is_grad_enabled():
            raise _refused(f"a score_mod that uses {name}, a tensor that needs gradients,", "use sdpa")


def _refused(what: str, advice: str) -> SimulationError:
    return SimulationError(f"flex_attention: {what} is not simulated: {advice}")
