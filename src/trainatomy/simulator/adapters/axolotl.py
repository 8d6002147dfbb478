"""axolotl's functions for adapters on meta tensors: a layer and its adapter as one step of autograd.

They take the place of ``axolotl.kernels.lora``, so that a workload needs no axolotl.  Products and copies run as
operators of PyTorch, in the order in which axolotl runs them.  Autograd keeps the input, of which adapters have no
copies in float32, and the adapters in the dtype of the input.  The activation is one Triton kernel; that of backward
works in place.

Its trainers of preferences score tokens by two kernels of ``axolotl.monkeypatch.trainer.utils``.

Source: axolotl 0.19, kernels/lora.py, kernels/quantize.py, kernels/swiglu.py, kernels/geglu.py,
monkeypatch/trainer/utils.py.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from trainatomy.operators.allocation.above_autograd import one_operation
from trainatomy.simulator.adapters.adapter import Adapter
from trainatomy.workload.model import LORA_KERNELS
from trainatomy.workload.preference import is_of_preferences

_LIBRARY = "axolotl.kernels.lora"
_OF_SCORES = "axolotl.monkeypatch.trainer.utils"
_NOTE = (
    "axolotl's functions ({}) allocate what the source code of axolotl 0.19 does; their Triton kernels are timed by "
    "the tensors that they move"
)


class _Layer(NamedTuple):
    """A frozen linear layer, and the scale of its adapter."""

    weight: Tensor
    bias: Tensor | None
    scale: float

    @classmethod
    def of(cls, module: Any) -> _Layer:
        base = module.base_layer
        return cls(base.weight, base.bias, module.scaling[module.active_adapters[0]])

    def plain(self, *, transposed: bool) -> Tensor:
        """Return the weight in 16 or 32 bits: [in, out] where transposed, else as it is stored."""
        state = getattr(self.weight, "quant_state", None)
        whole = self.weight if state is None else _dequantised(self.weight, state)
        return whole.t() if transposed else whole


def _dequantised(weight: Tensor, state: Any) -> Tensor:
    """Return a weight of 4 bits whole, by the C library's kernels where its scales are quantised, too."""
    functional = import_module("bitsandbytes.functional")
    if state.offset is None or state.state2 is None:
        whole: Tensor = functional.dequantize_4bit(weight, state, quant_type="nf4")
        return whole
    second = state.state2
    out = torch.empty(tuple(state.shape), dtype=state.dtype, device=weight.device)
    scales = torch.empty(state.absmax.numel(), dtype=torch.float32, device=weight.device)
    with one_operation(
        "bitsandbytes::dequantize_blockwise", state.absmax, second.code, second.absmax, scales, written=(3,)
    ):
        pass
    scales += state.offset
    with one_operation("bitsandbytes::dequantize_4bit", weight, scales, out, written=(2,)):
        pass
    return out


def _adapter(module: Any) -> tuple[Tensor, Tensor]:
    name = module.active_adapters[0]
    return module.lora_A[name].weight, module.lora_B[name].weight


def _dropped(module: Any, x: Tensor, *, training: bool) -> Tensor | None:
    """Return the input of adapters after dropout; None without."""
    dropout = module.lora_dropout[module.active_adapters[0]]
    return None if isinstance(dropout, nn.Identity) or not training else dropout(x)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _product(x: Tensor, layer: _Layer, a: Tensor, b: Tensor, dropped: Tensor | None = None) -> Tensor:
    """Return the output of a layer and its adapter, which is added in place."""
    weight = layer.plain(transposed=True)
    rows = _rows(x)
    out = torch.matmul(rows, weight)
    del weight
    down, up = a.t().to(x.dtype), b.t().to(x.dtype)
    out.addmm_((rows if dropped is None else _rows(dropped)) @ down, up, alpha=layer.scale)
    if layer.bias is not None:
        out += layer.bias
    return out.view(*x.shape[:-1], -1)


def _gradients(x: Tensor, a: Tensor, b: Tensor, gradient: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient between the matrices of an adapter, and those of the matrices."""
    inner = gradient @ b
    of_a, of_b = torch.empty_like(a.t()), torch.empty_like(b.t())
    of_a.addmm_(x.t(), inner, alpha=scale, beta=0)
    of_b.addmm_(a @ x.t(), gradient, alpha=scale, beta=0)
    return inner, of_a.t(), of_b.t()


class _Projections(torch.autograd.Function):
    """``LoRA_QKV`` and ``LoRA_O``: layers of one input."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def forward(
        ctx: Any, layers: Sequence[_Layer], x: Tensor, dropped: Tensor | None, *adapters: Tensor
    ) -> tuple[Tensor, ...]:
        pairs = list(zip(adapters[::2], adapters[1::2], strict=True))
        outputs = [_product(x, layer, a, b, dropped) for layer, (a, b) in zip(layers, pairs, strict=True)]
        ctx.save_for_backward(x, x if dropped is None else dropped, *(each.to(x.dtype) for each in adapters))
        ctx.layers, ctx.drops = layers, dropped is not None
        return tuple(outputs)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, dropped, *adapters = ctx.saved_tensors
        rows = [_rows(each) for each in gradients]
        adapted = _rows(dropped)
        pairs = list(zip(adapters[::2], adapters[1::2], strict=True))
        parts = [
            _gradients(adapted, a, b, gradient, layer.scale)
            for gradient, layer, (a, b) in zip(rows, ctx.layers, pairs, strict=True)
        ]
        of_x: Tensor | None = None
        for gradient, layer in zip(rows, ctx.layers, strict=True):
            weight = layer.plain(transposed=False)
            of_x = gradient @ weight if of_x is None else of_x.addmm_(gradient, weight)
            del weight
        assert of_x is not None
        if ctx.drops and len(pairs) == 1:
            of_dropped: Tensor | None = parts[0][0] @ pairs[0][0] * ctx.layers[0].scale
        else:
            of_dropped = torch.zeros_like(adapted) if ctx.drops else None
            total = of_x if of_dropped is None else of_dropped
            for layer, (inner, _, _), (a, _) in zip(ctx.layers, parts, pairs, strict=True):
                total.addmm_(inner, a, alpha=layer.scale)
        found = (of_x.view(x.shape), None if of_dropped is None else of_dropped.view(x.shape))
        return (None, *found, *(each for _, of_a, of_b in parts for each in (of_a, of_b)))


def _activated(gate: Tensor, up: Tensor) -> Tensor:
    """Return the product of an activation of ``gate`` with ``up``, by one kernel."""
    with one_operation("triton::kernel", gate, up) as results:
        results.append(torch.empty_like(gate))
    out = results[0]
    assert out is not None
    return out


class _Mlp(torch.autograd.Function):
    """``LoRA_MLP``: gate, up and down projection with the activation between them, of which autograd keeps less."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def forward(ctx: Any, layers: Sequence[_Layer], x: Tensor, dropped: Tensor | None, *adapters: Tensor) -> Tensor:
        gate_layer, up_layer, down_layer = layers
        gate_a, gate_b, up_a, up_b, down_a, down_b = adapters
        gate = _product(x, gate_layer, gate_a, gate_b, dropped)
        up = _product(x, up_layer, up_a, up_b, dropped)
        out = _product(_activated(gate, up), down_layer, down_a, down_b)
        kept = (each.to(x.dtype) for each in adapters)
        ctx.save_for_backward(x, x if dropped is None else dropped, gate, up, *kept)
        ctx.layers, ctx.drops = layers, dropped is not None
        return out

    @staticmethod
    @torch.amp.custom_bwd(device_type="cuda")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, dropped, gate, up, gate_a, gate_b, up_a, up_b, down_a, down_b = ctx.saved_tensors
        gate_layer, up_layer, down_layer = ctx.layers
        gradient, adapted, gate, up = (_rows(each) for each in (gradients[0], dropped, gate, up))
        hidden = torch.matmul(gradient, down_layer.plain(transposed=False))
        hidden.addmm_(gradient @ down_b, down_a, alpha=down_layer.scale)
        with one_operation("triton::kernel", hidden, gate, up, written=(0, 1, 2)):
            pass  # the activation and the gradients of gate and up, in place
        _inner, *of_down = _gradients(hidden, down_a, down_b, gradient, down_layer.scale)  # held until the end
        up_inner, *of_up = _gradients(adapted, up_a, up_b, up, up_layer.scale)
        gate_inner, *of_gate = _gradients(adapted, gate_a, gate_b, gate, gate_layer.scale)
        of_x = of_dropped = None
        if ctx.needs_input_grad[1]:
            of_x = torch.matmul(up, up_layer.plain(transposed=False))
            of_x.addmm_(gate, gate_layer.plain(transposed=False))
            of_dropped = torch.zeros_like(adapted) if ctx.drops else None
            total = of_x if of_dropped is None else of_dropped
            total.addmm_(up_inner, up_a, alpha=up_layer.scale)
            total.addmm_(gate_inner, gate_a, alpha=gate_layer.scale)
            of_x = of_x.view(x.shape)
            of_dropped = None if of_dropped is None else of_dropped.view(x.shape)
        return (None, of_x, of_dropped, *of_gate, *of_up, *of_down)


def _applied(function: type[torch.autograd.Function], modules: Sequence[Any], x: Tensor, *, training: bool) -> Any:
    layers = tuple(map(_Layer.of, modules))
    dropped = _dropped(modules[0], x, training=training)
    return function.apply(layers, x, dropped, *(each for module in modules for each in _adapter(module)))


def apply_lora_qkv(self: Any, X: Tensor) -> Any:  # noqa: N803
    """Return queries, keys and values of an attention."""
    return _applied(_Projections, (self.q_proj, self.k_proj, self.v_proj), X, training=self.training)


def apply_lora_o(self: Any, X: Tensor) -> Any:  # noqa: N803
    """Return the output projection of an attention."""
    return _applied(_Projections, (self.o_proj,), X, training=self.training)[0]


def apply_lora_mlp(self: Any, X: Tensor) -> Any:  # noqa: N803
    """Return the output of an MLP."""
    return _applied(_Mlp, (self.gate_proj, self.up_proj, self.down_proj), X, training=self.training)


_FUNCTIONS = {
    "apply_lora_qkv": apply_lora_qkv,
    "apply_lora_o": apply_lora_o,
    "apply_lora_mlp_swiglu": apply_lora_mlp,
    "apply_lora_mlp_geglu": apply_lora_mlp,
}


class _Selected(torch.autograd.Function):
    """Log-probabilities of tokens, by a kernel that leaves the sum of each row for that of backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, index: Tensor) -> Tensor:
        rows = len(logits)
        with one_operation("triton::kernel", logits, index) as results:
            results.append(torch.empty(rows, index.shape[-1], dtype=torch.float32, device=logits.device))
            results.append(torch.empty(rows, dtype=torch.float32, device=logits.device))
        found, sums = results
        assert found is not None
        ctx.save_for_backward(logits, index, sums)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        logits, index, sums = ctx.saved_tensors
        with one_operation("triton::kernel", gradients[0], logits, index, sums) as results:
            results.append(torch.empty_like(logits))
        return results[0], None


def selective_log_softmax(logits: Tensor, index: Tensor) -> Tensor:
    """Return the log-probability of each token, from a copy of logits that are not contiguous."""
    index = index.unsqueeze(-1)
    try:
        flat = logits.view(-1, logits.shape[-1])
    except RuntimeError:
        flat = logits.reshape(-1, logits.shape[-1]).contiguous()
    found: Tensor = _Selected.apply(flat, index.reshape(-1, 1).contiguous())
    return found.to(logits.dtype).reshape(index.shape).squeeze(-1)


def entropy_from_logits(logits: Tensor, chunk_size: int = 128) -> Tensor:
    """Return the entropy of each row of logits, which need not be contiguous."""
    with one_operation("triton::kernel", logits) as results:
        results.append(torch.empty(logits.shape[:-1].numel(), dtype=torch.float32, device=logits.device))
    found = results[0]
    assert found is not None
    return found.to(logits.dtype).reshape(logits.shape[:-1])


@contextlib.contextmanager
def simulated_axolotl() -> Iterator[None]:
    """Let a workload import axolotl's functions, installed or not."""
    module, scores = ModuleType(_LIBRARY), ModuleType(_OF_SCORES)
    vars(module).update(_FUNCTIONS)
    vars(scores).update(selective_log_softmax=selective_log_softmax, entropy_from_logits=entropy_from_logits)
    with mock.patch.dict(sys.modules, {_LIBRARY: module, _OF_SCORES: scores}):
        yield


def _used(workload: Any) -> list[str]:
    scores = (
        ["selective_log_softmax"] if is_of_preferences(workload) and workload.preference.trainer == "axolotl" else []
    )
    return [name for name in workload.model.kernels if name in LORA_KERNELS] + scores


ADAPTER = Adapter(
    is_used=lambda workload, _: workload.mode == "training" and bool(_used(workload)),
    simulated=lambda process, workload: simulated_axolotl(),
    notes=lambda workload, model: (_NOTE.format(", ".join(_used(workload))),),
)
