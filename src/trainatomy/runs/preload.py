"""Imported first in the process that workers are forked from: imports what predictions need, once for all workers.

Modules that no worker needs are hidden: ``pools.hidden_in_workers`` names them; see
``cli.unused_imports`` for why.  So is a GPU of this machine while libraries are imported, since a
process that has initialised CUDA cannot be forked.
"""

import atexit
import gc
import logging
import os
import sys
from contextlib import suppress
from importlib import import_module
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_MODULES = (
    "torch._dynamo",
    "transformers.trainer",
    "trainatomy.api.predicting",
    "trainatomy.prediction.assemble",
    "trainatomy.simulator.simulate",
    "trainatomy.timing.step",
    "trainatomy.training.loops.trainer",
)


def _import_bitsandbytes() -> None:
    """Import bitsandbytes without PyTorch's compiler, which it loads for functions that a simulation does not call."""
    import torch

    with mock.patch.object(torch, "compile", lambda function=None, **_: function):
        import_module("bitsandbytes")


def _import_deepspeed() -> None:
    """Import DeepSpeed where the workers need it."""
    if os.environ.get("TRAINATOMY_IMPORTS_DEEPSPEED"):
        from trainatomy.training.parallel.deepspeed import import_deepspeed

        import_deepspeed()


def _prepare_costs() -> None:
    """Price all points of the shipped calibrations, which all workers need."""
    from trainatomy.catalog.calibrations import shipped
    from trainatomy.timing.cost_model import efficiency_points
    from trainatomy.workload.arguments import arguments

    arguments()
    for calibration in shipped().values():
        if calibration.known_gpu is not None:
            list(efficiency_points(calibration.known_gpu, calibration))


def _wait_for_needs() -> None:
    """Import PyTorch, and learn from the process that started this one early what workers need."""
    if (path := os.environ.pop("TRAINATOMY_NEEDS", None)) is not None:
        with suppress(Exception):
            import_module("torch")
        told = Path(path).read_text(encoding="utf-8").splitlines()
        os.environ.update(zip(("TRAINATOMY_HIDDEN_MODULES", "TRAINATOMY_IMPORTS_DEEPSPEED"), told, strict=False))


def _import_all() -> None:
    visible = os.environ.get(_VISIBLE)
    os.environ[_VISIBLE] = ""
    gc.disable()  # what is imported stays: to search it for garbage takes a second
    logging.disable(logging.ERROR)
    try:
        _wait_for_needs()
        for name in os.environ.get("TRAINATOMY_HIDDEN_MODULES", "").split():
            sys.modules.setdefault(name, None)  # type: ignore[arg-type]
        with suppress(Exception):  # the prediction that needs a library reports what is wrong with it
            _import_bitsandbytes()
        for name in _MODULES:
            with suppress(Exception):
                import_module(name)
        for prepare in (_import_deepspeed, _prepare_costs):
            with suppress(Exception):
                prepare()
    finally:
        logging.disable(logging.NOTSET)
        gc.freeze()
        gc.enable()
        os.environ.pop(_VISIBLE) if visible is None else os.environ.update({_VISIBLE: visible})


def _end_silently(server: int) -> None:
    """End the process that workers are forked from at once: Triton would report what is frozen as leaked."""
    if os.getpid() == server:
        os._exit(0)


_import_all()
if getattr(sys.modules["__main__"], "main", None) is forkserver.main:
    atexit.register(_end_silently, os.getpid())
