"""Random numbers of the host in a dry run: those of weights without data are drawn, too, and thrown away.

So a generator is where it is on a GPU's machine when a script shuffles its samples, crops them or leaves out layers,
which decides how long a batch is.  Where a script sets no seed, PyTorch's generator begins as in every new process;
Python's and NumPy's differ from run to run there, and begin with one seed here.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from trainatomy.scripts.standins.notes import StandIns
from trainatomy.training.process import OF_FRESH_PROCESS, seed_host

MOST = 2**28
"""Numbers that are drawn for weights at most, in a second or two; those of larger models take too long."""
_REJECTS = (2, 13)
"""Release of PyTorch that draws a truncated normal distribution by rejection; those before invert uniform numbers."""
_PIECE = 2**16
"""Numbers that are drawn at once: PyTorch's CPU kernels draw those of a larger tensor as those of its pieces."""


def install(stand_ins: StandIns) -> None:
    """Seed the generators, and put the stand-ins in place."""
    seed_host(OF_FRESH_PROCESS)
    unseeded = stand_ins.process.recorder.unseeded
    unseeded.update(("random", "numpy"))
    _follow_seed(stand_ins, random, "random")
    stand_ins.when("numpy.random", partial(_seed_numpy, stand_ins))
    results = stand_ins.process.recorder.execution.results
    stand_ins.put(results, "run", _drawing(stand_ins, results.run))
    stand_ins.put(nn.init, "_no_grad_trunc_normal_", _truncated(stand_ins, nn.init._no_grad_trunc_normal_))


def _seed_numpy(stand_ins: StandIns, module: Any) -> None:
    module.seed(OF_FRESH_PROCESS % 2**32)
    _follow_seed(stand_ins, module, "numpy")


def _follow_seed(stand_ins: StandIns, module: Any, name: str) -> None:
    """Note when a script seeds a generator."""
    original, unseeded = module.seed, stand_ins.process.recorder.unseeded

    def seed(*arguments: Any, **keywords: Any) -> Any:
        if arguments or keywords:
            unseeded.discard(name)
        return original(*arguments, **keywords)

    stand_ins.put(module, "seed", seed)


def _drawing(stand_ins: StandIns, original: Any) -> Any:
    """Return the executor of operations that also draws what fills a tensor without data in host memory."""
    storages, left = stand_ins.process.storages, MOST
    known: dict[int, bool] = {}  # by the operator's identity, as asking for its tags is slow

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal left
        fills = known.get(id(func))
        if fills is None:
            fills = known[id(func)] = torch.Tag.nondeterministic_seeded in func.tags and func._schema.is_mutable
        if fills and stand_ins.draws and kwargs.get("generator") is None and left > 0:
            tensor = kwargs.get("out", args[0])
            if tensor.is_meta and not storages.on_device(tensor):
                left -= tensor.numel()
                if left > 0:
                    _draw(func, tensor, args[1:], kwargs)
                else:
                    stand_ins.note("random numbers")
        return original(func, args, kwargs)

    return run


def _truncated(stand_ins: StandIns, original: Any) -> Any:
    """Return ``trunc_normal_`` that draws once on the host: hardly a number is drawn again, as bounds are wide."""
    process = stand_ins.process
    draw = "normal_" if process.processor.torch_version >= _REJECTS else "uniform_"

    def fill(tensor: torch.Tensor, *arguments: Any, generator: Any = None, **keywords: Any) -> torch.Tensor:
        if process.placement.is_device(tensor):
            return original(tensor, *arguments, generator=generator, **keywords)
        with torch.no_grad():
            return getattr(tensor, draw)(generator=generator)

    return fill


def _draw(func: Any, tensor: torch.Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Draw as many numbers as an operation that fills a tensor draws on the CPU."""
    count = tensor.numel()
    with _disable_current_modes():
        piece = torch.empty(min(count, 2 * _PIECE), dtype=tensor.dtype)
        while count:
            size = _PIECE if count >= 2 * _PIECE else count
            func(piece[:size], *rest, **kwargs)
            count -= size
