"""FlexAttention's buffers compared, event by event, with those of the code that Inductor writes for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from trainatomy.catalog.versions import parse_version
from trainatomy.operators.allocation import allocation_rules
from trainatomy.operators.allocation.plan import Processor
from trainatomy.simulator.compiled import preload_compiler, simulated_compiler
from trainatomy.simulator.process import SimulatedProcess


@dataclass(frozen=True)
class Call:
    """A call of transformers' attention; ``inputs``: dtype of queries and keys, whose gradients are wanted."""

    batch: int = 2
    heads: int = 8
    key_heads: int = 2
    queries: int = 1152
    keys: int = 1152
    head: int = 64
    dtype: torch.dtype = torch.bfloat16
    inputs: torch.dtype | None = None
    trains: bool = True
    contiguous: bool = False
    softcap: float | None = None
    window: int | None = None


def events(call: Call, *, compiled: bool) -> list[tuple[str, int, int]]:
    """Run a call, compiled by Inductor or by the functions of this package, and return what it allocates.

    Returns:
        Action, number of the allocation, bytes.
    """
    version = parse_version(torch.__version__)
    process = SimulatedProcess("NVIDIA H200", 150 << 30, Processor((9, 0), 132, version), allocation_rules())
    with process.open(), simulated_compiler(process) if compiled else contextlib.nullcontext():
        masks, start = run(call, process)
    numbers: dict[int, int] = {}
    return [
        (event.action, numbers.setdefault(event.allocation, len(numbers)), event.bytes)
        for event in [*masks, *process.trace.events[start:]]
    ]


def run(call: Call, process: SimulatedProcess) -> tuple[list[Any], int]:
    """Make the mask and run a call; returns the mask's events and the number of the call's first one."""
    from transformers import masking_utils
    from transformers.integrations import flex_attention

    function = masking_utils.causal_mask_function
    if call.window is not None:
        function = masking_utils.sliding_window_causal_mask_function(call.window)
    offset = call.keys - call.queries
    mask = masking_utils.flex_attention_mask(
        call.batch, call.queries, call.keys, offset, mask_function=function, device="cuda"
    )
    masks = list(process.trace.events)

    def make(heads: int, length: int, dtype: torch.dtype) -> Any:
        made = torch.empty(call.batch, length, heads, call.head, device="cuda", dtype=dtype, requires_grad=call.trains)
        made = made.transpose(1, 2) * 1
        return made.contiguous() if call.contiguous else made

    inputs = call.inputs or call.dtype
    query = make(call.heads, call.queries, inputs)
    key, value = make(call.key_heads, call.keys, inputs), make(call.key_heads, call.keys, call.dtype)
    grad = torch.empty(call.batch, call.queries, call.heads, call.head, device="cuda", dtype=call.dtype)

    class Layer:
        training = call.trains

    start = len(process.trace.events)
    with torch.set_grad_enabled(call.trains):
        out, sums = attend(flex_attention, call, Layer, query, key, value, mask)
    del query, key, value, sums
    if call.trains:
        out.backward(grad)
    del out
    return masks, start


def attend(library: Any, call: Call, layer: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
    """Call transformers' function; where autocast casts, what it casts to is part of the graph."""
    if call.inputs is None:
        return library.flex_attention_forward(layer, query, key, value, mask, scaling=0.1, softcap=call.softcap)
    compiler: Callable[..., Any] = torch.compile
    if getattr(compiler, "__self__", None) is None:  # this package's functions ask autocast
        with torch.autocast("cuda", call.dtype):
            return library.flex_attention_forward(layer, query, key, value, mask, scaling=0.1)

    def cast(query: Any, key: Any, value: Any, mask: Any) -> Any:
        query, key = query.to(call.dtype), key.to(call.dtype)
        aux = library.AuxRequest(lse=True)
        return library.flex_attention(query, key, value, block_mask=mask, scale=0.1, enable_gqa=True, return_aux=aux)

    out, aux = compiler(cast)(query, key, value, mask)
    return out.transpose(1, 2).contiguous(), aux.lse.to(value.dtype)


CALLS = {
    "grouped queries": Call(),
    "one head of keys for each of queries": Call(heads=6, key_heads=6, head=96, dtype=torch.float32),
    "autocast": Call(inputs=torch.float32),
    "contiguous": Call(contiguous=True),
    "softcap": Call(softcap=30.0),
    "sliding window": Call(window=256),
    "a length of parts of blocks": Call(queries=1500, keys=1500, head=128),
    "evaluation": Call(trains=False),
    "long": Call(batch=1, queries=4096, keys=4096),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_buffers_are_those_of_inductor(name: str) -> None:
    pytest.importorskip("triton")
    preload_compiler()
    assert events(CALLS[name], compiled=False) == events(CALLS[name], compiled=True)
