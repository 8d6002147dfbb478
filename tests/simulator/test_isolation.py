"""The state of the process is unchanged after a prediction, a failure and Ctrl-C."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn
from torch.utils import _device, _foreach_utils, checkpoint

import trainatomy
from trainatomy.errors import FactoryError, SimulationError
from trainatomy.operators.allocation.plan import Processor
from trainatomy.simulator import isolation
from trainatomy.simulator.isolation import isolated
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.workload import Workload

PRECISIONS = [("generic", "all"), *(("cuda", each) for each in ("all", "matmul", "conv", "rnn")), ("mkldnn", "matmul")]
CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
PATCHED = (torch, torch.cuda, torch.accelerator, torch.cuda.nvtx, torch.version, torch.Tensor, nn.init, nn.Module)
BATCH = {"x": torch.ones(2, 8)}


def flags_of_torch() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in dir(torch._C):
        takes_no_argument = name.startswith("_get_") and name != "_get_operator_version_map"
        if takes_no_argument and "allow_tf32" not in name:  # raises after the new settings of TF32 were used
            with contextlib.suppress(TypeError, RuntimeError):
                found[f"torch._C.{name}"] = repr(getattr(torch._C, name)())
    found["fp32_precision"] = [torch._C._get_fp32_precision_getter(*each) for each in PRECISIONS]
    found["modes"] = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled())
    found["defaults"] = (torch.get_default_dtype(), _device.CURRENT_DEVICE, torch.get_num_threads())
    found["deterministic"] = torch.are_deterministic_algorithms_enabled()
    for device in ("cuda", "cpu"):
        found[f"autocast {device}"] = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
    found["autocast cache"] = torch.is_autocast_cache_enabled()
    found["mode stacks"] = (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack())
    return found


def dispatcher() -> dict[str, Any]:
    """Return the registered kernels and their effect on meta tensors of the user."""
    data = torch.empty(2, 4, 8, 8, device="meta")
    weight = torch.empty(4, 4, 3, 3, device="meta").to(memory_format=torch.channels_last)
    return {
        "strides": torch.conv2d(data, weight).stride(),
        "convolution": torch._C._dispatch_dump("aten::convolution"),
        "fused sgd": torch._C._dispatch_has_kernel_for_dispatch_key("aten::_fused_sgd_", "Meta"),
        "convolution_backward": torch._C._dispatch_dump("aten::convolution_backward"),
        "implementations": len(torch.library._impls),
    }


def python() -> dict[str, Any]:
    loggers = logging.root.manager.loggerDict
    found: dict[str, Any] = {
        f"logger {name}": one.level for name, one in loggers.items() if isinstance(one, logging.Logger)
    }
    return found | {
        "environment": dict(os.environ),
        "random": random.getstate(),
        "numpy": repr(np.random.get_state()),
        "torch": torch.get_rng_state().tolist(),
        "warnings": list(warnings.filters),
        "logging": (logging.root.manager.disable, logging.root.level, list(logging.root.handlers)),
        "signals": [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
        "garbage": (gc.isenabled(), gc.get_freeze_count(), gc.get_threshold(), list(gc.callbacks)),
        "interpreter": (list(sys.path), list(sys.argv), Path.cwd(), sys.excepthook, sys.stdout, sys.stderr),
        "threads": threading.active_count(),
    }


def libraries() -> dict[str, Any]:
    import bitsandbytes.functional as bnb
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.utils.logging import get_verbosity

    states = (PartialState, AcceleratorState, GradientState)
    found: dict[str, Any] = {each.__name__: dict(each._shared_state) for each in states}
    found["attention"] = dict(ALL_ATTENTION_FUNCTIONS._global_mapping)
    found["verbosity"] = get_verbosity()
    found["bitsandbytes"] = [getattr(bnb, name) for name in ("get_paged", "optimizer_update_32bit", "prefetch_tensor")]
    return found


def patched_objects() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for owner in (*PATCHED, torch._C, _foreach_utils, torch._tensor_str, torch.optim.Optimizer, torch.UntypedStorage):
        content = {name: value for name, value in vars(owner).items() if not isinstance(value, types.ModuleType)}
        found |= {f"{owner.__name__}.{name}": value for name, value in content.items() if not name.startswith("__")}
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.") and isinstance(module, types.ModuleType):
            found |= {f"{name}.{check}": vars(module)[check] for check in CHECKS if check in vars(module)}
    hooks = vars(nn.modules.module) | vars(sys.modules["torch.optim.optimizer"])
    found |= {
        name: len(value) for name, value in hooks.items() if name.startswith("_global_") and hasattr(value, "__len__")
    }
    found["checkpoint"] = dict(checkpoint._allowed_determinism_checks_to_fns)
    return found


def snapshot() -> dict[str, Any]:
    parts = (python(), flags_of_torch(), dispatcher(), libraries(), patched_objects())
    return {name: value for part in parts for name, value in part.items()}


def differing(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the differences, except loggers of libraries that were imported in between."""
    return {
        name: (before.get(name), after.get(name))
        for name in before.keys() | after.keys()
        if not (before.get(name) is after.get(name) or before.get(name) == after.get(name))
        and not (name.startswith("logger ") and name not in before)
    }


class Net(nn.Module):
    """Linear layer that calls a function in its forward."""

    def __init__(self, in_forward: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.in_forward = in_forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.in_forward()
        return self.linear(x).sum()


def interrupt() -> None:
    raise KeyboardInterrupt


def exit_process() -> None:
    sys.exit(3)


def fail() -> None:
    torch.bincount(torch.empty(3, device="cuda").long())


def change_global_state() -> None:
    """Change everything that training code is known to change."""
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.cuda.enable_flash_sdp(False)
    torch.set_autocast_enabled("cuda", True)
    torch.set_default_dtype(torch.bfloat16)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    os.environ["TRAINATOMY_TEST"] = "1"
    os.environ.pop("HOME", None)
    logging.getLogger("torch").setLevel(logging.DEBUG)
    warnings.simplefilter("error")


@pytest.fixture(autouse=True)
def old_objects_are_no_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freeze nothing, as in the process of a user."""
    gc.unfreeze()
    monkeypatch.setattr(isolation, "_others_freeze", False)


@pytest.fixture(scope="module", autouse=True)
def _imported() -> Iterator[None]:
    """Import all libraries of a prediction first, so that imports do not count as changes."""
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)  # not what a simulation sets
    predict_bert("trainer", optim="adamw_bnb_8bit")
    yield
    torch.set_num_threads(threads)


def predict_net(in_forward: Callable[[], object] = lambda: None, **settings: Any) -> trainatomy.Prediction:
    with torch.random.fork_rng():
        model = Net(in_forward)
    return trainatomy.predict(model, batch=BATCH, gpu="h200", **settings)


def predict_bert(loop: str, **train: Any) -> trainatomy.Prediction:
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    model = {"class": "BertForMaskedLM", "config": {**sizes, "vocab_size": 99}}
    return trainatomy.predict(Workload.from_mapping({"loop": loop, "model": model, "train": train}))


@pytest.mark.parametrize(
    ("loop", "train"),
    [
        ("trainer", {"fp16": True}),
        ("trainer", {"bf16": True, "tf32": True, "gradient_checkpointing": True}),
        ("trainer", {"optim": "adamw_bnb_8bit"}),
        ("pytorch", {"fp16": True}),
        ("pytorch", {"bf16": True, "tf32": True, "gradient_checkpointing": True}),
    ],
)
def test_a_prediction_leaves_nothing_behind(loop: str, train: dict[str, Any]) -> None:
    before = snapshot()
    predict_bert(loop, **train)
    assert differing(before, snapshot()) == {}


@pytest.mark.parametrize(
    ("in_forward", "raised"),
    [(fail, SimulationError), (interrupt, KeyboardInterrupt), (exit_process, (SystemExit, FactoryError))],
)
def test_a_failure_leaves_nothing_behind(in_forward: Callable[[], object], raised: Any) -> None:
    before = snapshot()
    with pytest.raises(raised):
        predict_net(in_forward)
    assert differing(before, snapshot()) == {}


def test_changes_by_a_training_are_restored() -> None:
    before = snapshot()
    predict_net(change_global_state)
    assert differing(before, snapshot()) == {}


def test_a_second_prediction_is_equal() -> None:
    first, second = predict_bert("trainer", fp16=True), predict_bert("trainer", fp16=True)
    assert (first.memory, first.time, first.modules) == (second.memory, second.time, second.modules)


@contextlib.contextmanager
def settings_of_the_user() -> Iterator[None]:
    """Set up a process with another precision, without gradients and with the user's own accelerator."""
    PartialState._shared_state["backend"] = "mine"
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), torch.autocast("cpu"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)
        PartialState._shared_state.clear()


class Dropping(nn.Module):
    """Layers that are left out at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) < 0.5 and random.random() < 0.9 and np.random.rand() < 0.9:
                x = layer(x).relu()
        return x.sum() + self.layers[0].weight.sum()


def test_random_numbers_of_the_user_decide_nothing() -> None:
    def found(seed: int) -> Any:
        for draw in (torch.manual_seed, random.seed, np.random.seed):
            draw(seed)
        return trainatomy.predict(Dropping(), batch=BATCH, gpu="h200").memory

    assert found(1) == found(2)


def test_settings_of_the_user_have_no_effect_and_do_not_change() -> None:
    alone = trainatomy.predict(model := Net(), batch=BATCH, gpu="h200")
    with settings_of_the_user():
        before = snapshot()
        beside = trainatomy.predict(model, batch=BATCH, gpu="h200")
        assert differing(before, snapshot()) == {}
    assert beside.memory == alone.memory


def test_frozen_objects_of_the_user_stay_frozen() -> None:
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        predict_net()
        assert gc.get_freeze_count() > frozen / 2  # some of them may have died
    finally:
        gc.unfreeze()


def test_what_the_user_froze_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counted.append(1) or 1)
    for _ in range(3):
        with isolated():
            pass
    assert len(counted) == 1


class InterruptAfter:
    """Sends Ctrl-C to this process after the given number of executed lines of the simulator; notes these lines."""

    files = ("/simulator/process.py", "/simulator/isolation.py", "/simulator/driver.py", "/allocation/meta.py")

    def __init__(self, lines: int) -> None:
        self.after = lines
        self.lines: list[tuple[str, int]] = []

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.endswith(self.files):
            return None
        if event == "line":
            self.lines.append((frame.f_code.co_filename, frame.f_lineno))
            if len(self.lines) == self.after:
                signal.raise_signal(signal.SIGINT)
        return self


def open_with_trace(tracer: InterruptAfter) -> None:
    process = SimulatedProcess("NVIDIA H200", 1 << 37, Processor((9, 0), 132, (2, 11)))
    sys.settrace(tracer)
    try:
        with isolated(), process.open():
            torch.ones(3).to("cuda")
    finally:
        sys.settrace(None)


def moments(lines: list[tuple[str, int]]) -> set[int]:
    """Return when to interrupt: at the first and the last run of each line of isolation.py, and a few of the others."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for count, (path, line) in enumerate(lines, 1):
        if path.endswith("/isolation.py"):
            first.setdefault(line, count)
            last[line] = count
    return {*first.values(), *last.values(), *range(80, len(lines), len(lines) // 12)}


def test_ctrl_c_at_any_line_leaves_nothing_behind() -> None:
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # CI may have it ignored
    try:
        open_with_trace(count := InterruptAfter(-1))
        assert len(moments(count.lines)) > 100
        before = snapshot()
        for number in sorted(moments(count.lines)):
            with pytest.raises(KeyboardInterrupt):
                open_with_trace(InterruptAfter(number))
            assert differing(before, snapshot()) == {}, f"after line {number}, {count.lines[number - 1]}"
    finally:
        signal.signal(signal.SIGINT, handler)


def test_threads_wait_for_each_other() -> None:
    models = {size: Summed(size) for size in (8, 64, 512)}

    def predicted(size: int) -> Any:
        return trainatomy.predict(models[size], batch={"x": torch.ones(4, size)}, gpu="h200").memory

    expected = {size: predicted(size) for size in models}
    found: dict[int, Any] = {}
    before = snapshot()
    threads = [threading.Thread(target=lambda size=size: found.update({size: predicted(size)})) for size in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected
    assert differing(before, snapshot()) == {}


class Summed(nn.Module):
    """Return the loss of two layers."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).sum()


def test_a_prediction_inside_a_simulated_step_is_refused() -> None:
    with pytest.raises(SimulationError, match="already running in this thread"):
        predict_net(lambda: predict_net())
    assert predict_net().memory.peak_allocated_bytes > 0
