"""``torch.compile`` in a simulated process.

PyTorch's own Dynamo and AOTAutograd trace the model on meta tensors, with what CUDA runs in place of composite
functions and with CUDA's autocast; their graphs are given to Inductor as such of the GPU.  What Inductor writes around
its kernels runs in the process and allocates; kernels do nothing.  Where Dynamo breaks the graph, Python runs in the
process.

Operators that a compiler cannot trace as CUDA runs them.

Inductor's code around its kernels, executed in a simulated process: it allocates, kernels do nothing.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

from trainatomy.errors import SimulationError
from trainatomy.operators.allocation.above_autograd import no_operation, one_operation
from trainatomy.simulator.compiled.device import (
    CompilerProperties,
    Trials,
    install_compiler,
    off_gpu,
    on_gpu,
    put_on_gpu,
)
from trainatomy.simulator.compiled.source import read_source
from trainatomy.simulator.device import SimulatedGenerator
from trainatomy.simulator.modules import without_hooks_of_all_modules
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.workload.train import MODES

_aten: Any = torch.ops.aten
_nn: Any = torch._C._nn


def nll_loss_nd(
    input: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
) -> torch.Tensor:
    """Run the operators that ``nll_loss_nd`` consists of: with Python's dispatcher, autograd does not know it.

    Source: aten/src/ATen/native/LossNLL.cpp (``nll_loss_nd_symint``).
    """
    if input.dim() in (1, 2):
        flat: torch.Tensor = _aten.nll_loss_forward(input, target, weight, reduction, ignore_index)[0]
        return flat
    if input.dim() == 4:
        planes: torch.Tensor = _aten.nll_loss2d_forward(input, target, weight, reduction, ignore_index)[0]
        return planes
    batch, classes, shape = input.shape[0], input.shape[1], input.shape[2:]
    logits, classes_wanted = input.reshape(batch, classes, 1, -1), target.reshape(batch, 1, -1)
    loss: torch.Tensor = _aten.nll_loss2d_forward(logits, classes_wanted, weight, reduction, ignore_index)[0]
    return loss if reduction else loss.view(batch, *shape)


FUNCTIONS = {_nn.nll_loss_nd: nll_loss_nd}


_RANDOM = "torch.ops.higher_order.graphsafe_run_with_rng_state"
"""Name of what runs a random operator with the state of a generator, so that recomputation draws the same numbers."""
GRAPH = "compiled_graph"
"""Name of calls of compiled graphs among what takes the CPU time besides operations."""
Call = Callable[[list[Any]], Any]


def load_wrapper(text: str, trials: Trials, count: Callable[[str], None]) -> Call:
    """Return the function of a wrapper that runs a graph, given a list of its inputs that it empties.

    Args:
        text: Inductor's code.
        trials: Tries kernels before their first launch.
        count: Counts its calls, which take the CPU time besides their kernels.
    """
    from torch._inductor import async_compile

    space: dict[str, Any] = {"__name__": "compiled", "__file__": "compiled"}
    with mock.patch.object(async_compile, "AsyncCompile", partial(_Kernels, trials)):
        exec(compile(text.replace(_RANDOM, "with_rng_state"), "<inductor>", "exec"), space)
    space.update(
        empty_strided_cuda=_buffer,
        reinterpret_tensor=_reinterpret,
        assert_size_stride=lambda *arguments: None,
        assert_alignment=lambda *arguments: None,
        copy_misaligned=lambda tensor: tensor,
        extern_kernels=_ExternKernels(),
        with_rng_state=lambda operator, *arguments, rng_state=None, **options: operator(*arguments, **options),
    )
    call: Call = space["call"]

    def run(inputs: list[Any]) -> Any:
        count(GRAPH)
        return call(inputs)

    return run


def _buffer(size: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
    with no_operation("aten::empty_strided"):
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


def _reinterpret(tensor: torch.Tensor, size: Any, stride: Any, offset: int = 0) -> torch.Tensor:
    with no_operation("aten::as_strided"):
        return torch.as_strided(tensor, size, stride, offset + tensor.storage_offset())


class _ExternKernels:
    """Kernels of libraries: those of PyTorch."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Kernels:
    """Inductor's ``AsyncCompile``: makes kernels that do nothing."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials

    def triton(self, name: str, source: str, **options: Any) -> _Kernel:
        return _Kernel(name, source, self._trials)

    def wait(self, scope: dict[str, Any]) -> None:
        """Nothing is compiled."""


class _Kernel:
    """A kernel that Inductor generated."""

    def __init__(self, name: str, source: str, trials: Trials) -> None:
        self.name = name
        self._source, self._trials = source, trials
        self._said = read_source(source)

    def run(self, *arguments: Any, **options: Any) -> None:
        """Write a launch, with the memory in which the kernel is tried before its first one."""
        self._trials.before(self._source, arguments)
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        moved = self._said.moved_bytes(arguments)
        with one_operation("inductor::fused", *tensors, kernel=self.name, bytes=moved, **self._said.numbers):
            pass


_OURS = str(Path(__file__).parents[2])


def preload() -> None:
    """Import the compiler, and let Dynamo fill its tables of PyTorch's functions before some of them are replaced."""
    import torch._dynamo
    import torch._inductor.config
    from torch._dynamo import trace_rules
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    with torch._inductor.config.patch(compile_threads=1):  # no processes that would compile kernels
        import_module("torch._inductor.async_compile")
        import_module("torch._inductor.compile_fx")
    TorchInGraphFunctionVariable._get_handlers()
    trace_rules.get_torch_obj_rule_map()


class _BelowFunctions(TorchDispatchMode):
    """Keeps the process's function mode out of the compiler's own dispatch modes."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return func(*args, **kwargs or {})


class _AutocastBackward(TorchDispatchMode):
    """Casts the operands of the products that autograd's formulas consist of, as autocast does.

    AOTAutograd traces the backward pass with the autocast that is on around what is compiled, which an eager backward
    pass does not see (``torch._functorch.config.backward_pass_autocast``, torch 2.11-2.15).
    """

    supports_higher_order_operators = True

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS:
            args = tree_map(self._cast, args)
        return func(*args, **kwargs or {})

    def _cast(self, value: Any) -> Any:
        """Return a tensor of float32 in autocast's type, everything else unchanged."""
        is_cast = isinstance(value, torch.Tensor) and value.dtype == torch.float32
        return value.to(self._dtype) if is_cast else value


_PRODUCTS = frozenset({_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default})


@contextlib.contextmanager
def _tracing_backward(tagged: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Trace a backward pass, given the context in which AOTAutograd does."""
    with tagged(), contextlib.ExitStack() as stack:
        if torch.is_autocast_enabled("cuda"):
            stack.enter_context(_AutocastBackward(torch.get_autocast_dtype("cuda")))
        yield


class Compiler:
    """``torch.compile`` of a simulated process.

    Attributes:
        wrappers: Code around the kernels of each graph, in the order in which Inductor wrote it.
        eager: Why calls of ``torch.compile`` were left without effect.
        recompilations: How often Dynamo compiled code again, by its reason.
        autotunes: Whether a mode measures kernels against each other.
        given_up: Why Dynamo would have compiled a function once more, and runs it eagerly.
    """

    def __init__(self, process: SimulatedProcess, fails: Callable[[Any, SimulationError], None] | None = None) -> None:
        self.wrappers: list[str] = []
        self.eager: list[str] = []
        self.autotunes = False
        self.recompilations: Counter[str] = Counter()
        self.given_up: list[str] = []
        self._process, self._fails = process, fails
        self._trials = Trials(process.tuning.buffer_bytes())
        self._is_called, self._last_cause = False, ""
        self._compile = torch.compile
        self._one_backend = self._backend  # Dynamo looks up what it compiled by it
        self._known_breaks = _breaks()

    def install(self, stack: contextlib.ExitStack) -> None:
        """Replace ``torch.compile`` until ``stack`` closes."""
        from torch._dynamo import guards
        from torch._dynamo.convert_frame import CatchErrorsWrapper
        from torch.nn.attention import flex_attention

        def patch(target: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, value))

        patch(torch, "compile", self.compile)
        patch(torch.cuda, "default_generators", (SimulatedGenerator("cuda"),))
        patch(CatchErrorsWrapper, "__call__", self._converting(CatchErrorsWrapper.__call__))
        convert_frame: Any = import_module("torch._dynamo.convert_frame")
        reasons, exceeds = convert_frame.get_and_maybe_log_recompilation_reasons, convert_frame.exceeds_recompile_limit
        patch(convert_frame, "get_and_maybe_log_recompilation_reasons", self._counting(reasons))
        patch(convert_frame, "exceeds_recompile_limit", self._giving_up(exceeds))
        patch(guards.CheckFunctionManager, "__init__", self._guarding(guards.CheckFunctionManager.__init__))
        patch(guards.GuardBuilder, "TORCH_FUNCTION_STATE", lambda builder, guard: None)
        patch(flex_attention, "_validate_device", _validate_nothing)  # which refuses meta tensors
        logger = logging.getLogger("torch._dynamo")
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)  # what it warns of is in the notes
        stack.callback(torch.compiler.reset)
        stack.callback(gc.unfreeze)

    def graph_breaks(self) -> dict[str, int]:
        """Return how often Dynamo broke a graph so far, by its reason."""
        return {reason: count for reason, count in _breaks().items() if count > self._known_breaks.get(reason, 0)}

    def compile(self, model: Any = None, **options: Any) -> Any:
        """Compile a module or a function; what is not simulated leaves it as it is."""
        from torch._dynamo.eval_frame import OptimizedModule

        if model is None:
            return partial(self.compile, **options)
        if (reason := _unsupported(options)) is not None:
            self.eager.append(reason)
            return model
        self.autotunes |= options.get("mode") not in (None, "default")
        if isinstance(model, nn.Module):
            return OptimizedModule(model, self._compiled)  # type: ignore[arg-type]
        return self._compiled(model)

    @property
    def recompile_limit(self) -> int:
        """Return how often Dynamo compiles a function."""
        import torch._dynamo.config

        return int(torch._dynamo.config.recompile_limit)

    # -- Dynamo --------------------------------------------------------------------------------------------------------

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is compiled when it is called.

        Calls leave cycles of Python objects that hold outputs.  Python's collector, which is off in a simulation, would
        soon release them: after each call here.
        """
        from torch._dynamo.exc import TorchDynamoException

        compiled = self._compile(function, backend=self._one_backend, dynamic=False)
        failed = False

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal failed
            if self._is_called or failed:  # by Python between two graphs of another one
                return (function if failed else compiled)(*args, **kwargs)
            self._is_called = True
            graphs = len(self.wrappers)
            for module in function.modules() if isinstance(function, nn.Module) else ():
                self._process.count_calls_of(module, args)
            try:
                with without_hooks_of_all_modules(), _same_function_modes():
                    return compiled(*args, **kwargs)
            except (TorchDynamoException, SimulationError) as error:
                failure = error if isinstance(error, SimulationError) else _failure(error)
                if self._fails is None:
                    raise failure from error
                failed = True
                self._fails(function, failure)
            finally:
                self._is_called = False
                gc.collect()
                if len(self.wrappers) > graphs:
                    gc.freeze()  # what compiling leaves is large, and later collections need not look at it
            return function(*args, **kwargs)

        call._torchdynamo_inline = function  # type: ignore[attr-defined]
        return call

    @contextlib.contextmanager
    def _outside(self) -> Iterator[None]:
        """Run the block outside of the process's modes, with a compiler's view of the GPU."""
        functions = []
        while torch._C._len_torch_function_stack():
            functions.append(torch._C._pop_torch_function_stack())
        process = self._process
        try:
            with _disable_current_modes(), contextlib.ExitStack() as stack:
                properties = CompilerProperties(process.cards)
                install_compiler(stack, properties)
                yield
        finally:
            for mode in reversed(functions):
                torch._C._push_on_torch_function_stack(mode)

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        """Trace what CUDA runs, with its autocast."""
        with self._process.functions.replaced(FUNCTIONS), self._process.functions, _BelowFunctions():
            yield

    def _traced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that traces what CUDA runs."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._tracing():
                return function(*args, **kwargs)

        return run

    def _converting(self, convert: Callable[..., Any]) -> Callable[..., Any]:
        """Return what Dynamo does with a frame: it compiles it outside of the process, and leaves our own alone.

        Python may depend on the dtype of a result, so that Dynamo must know what autocast makes of it.
        """
        from torch._dynamo import utils

        types: Any = import_module("torch._dynamo.types")

        def converting(wrapper: Any, frame: Any, *args: Any) -> Any:
            if frame.f_code.co_filename.startswith(_OURS):
                skip = types.FrameExecStrategy(types.FrameAction.SKIP, types.FrameAction.SKIP)
                return types.ConvertFrameReturn(frame_exec_strategy=skip, apply_to_code=False)
            with self._outside(), mock.patch.object(utils, "run_node", self._traced(utils.run_node)):
                return convert(wrapper, frame, *args)

        return converting

    def _counting(self, reasons: Callable[..., list[str]]) -> Callable[..., list[str]]:
        """Return what says why code is compiled again, and count it."""

        def counted(*args: Any, **kwargs: Any) -> list[str]:
            found = reasons(*args, **kwargs)
            self._last_cause = next((_cause(reason) for reason in found), "")
            self.recompilations.update([self._last_cause] if found else [])
            return found

        return counted

    def _giving_up(self, exceeds: Callable[..., tuple[bool, str]]) -> Callable[..., tuple[bool, str]]:
        """Return what says whether code was compiled too often, and note it."""

        def noted(cache_size: Any, compile_id: Any) -> tuple[bool, str]:
            found = exceeds(cache_size, compile_id)
            if found[0]:
                self.given_up.append(self._last_cause)
            return found

        return noted

    def _guarding(self, create: Callable[..., None]) -> Callable[..., None]:
        """Return the making of guards inside of the process: a tensor's dispatch keys are checked there."""

        def guarding(*args: Any, **kwargs: Any) -> None:
            with self._process.recorder:
                create(*args, **kwargs)

        return guarding

    # -- AOTAutograd and Inductor --------------------------------------------------------------------------------------

    def _backend(self, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile a graph of Dynamo as Inductor does."""
        from torch._functorch import config as functorch_config

        aot_autograd: Any = import_module("torch._functorch.aot_autograd")
        compile_fx: Any = import_module("torch._inductor.compile_fx")

        create, passes = aot_autograd.create_functional_call, compile_fx._recursive_joint_graph_passes

        def joint_passes(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            put_on_gpu(module, _fake_mode())
            if "input_device" in kwargs:
                kwargs["input_device"] = torch.device("cpu")  # of the patterns that it looks for
            return passes(module, *args, **kwargs)

        capture: Any = import_module("torch._functorch._aot_autograd.graph_capture_wrappers")
        tagged = capture.set_partitioner_tag_is_backward
        with contextlib.ExitStack() as stack:
            for target, name, value in (
                (capture, "set_partitioner_tag_is_backward", partial(_tracing_backward, tagged)),
                (aot_autograd, "create_functional_call", lambda *a, **k: self._traced(create(*a, **k))),
                (compile_fx, "_recursive_joint_graph_passes", joint_passes),
            ):
                stack.enter_context(mock.patch.object(target, name, value))
            stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
            compiled: Callable[..., Any] = compile_fx.compile_fx(graph, inputs, inner_compile=self._lower)

        @wraps(compiled)
        def run(*args: Any, **kwargs: Any) -> Any:
            return tree_map(off_gpu, compiled(*args, **kwargs))

        return run

    def _lower(self, module: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        """Let Inductor write the code of a graph, and return what runs it in the process."""
        from torch._inductor import config
        from torch._inductor.graph import GraphLowering

        compile_fx: Any = import_module("torch._inductor.compile_fx")

        def load(lowering: Any) -> Any:
            code = lowering.codegen()[0]
            text: str = getattr(code, "value", code)
            self.wrappers.append(text)
            return SimpleNamespace(call=load_wrapper(text, self._trials, count), __file__="", key="", runner=None)

        mode, count = _fake_mode(), self._process.recorder.operations.count_call
        with (
            self._outside(),
            mock.patch.object(GraphLowering, "compile_to_module", load),
            config.patch(fx_graph_cache=False, fx_graph_remote_cache=False, compile_threads=1),
        ):
            put_on_gpu(module, mode)
            options["cudagraphs"] = compile_fx.BoxedBool(False)
            try:
                return compile_fx.compile_fx_inner(module, [on_gpu(each, mode) for each in inputs], **options)
            except Exception as error:
                raise _failure(error) from error


def _cause(reason: str) -> str:
    """Return the condition that did not hold when Dynamo compiled code again."""
    line = next((line for line in reason.splitlines() if ": " in line), reason)
    return line.partition(": ")[2].partition("  #")[0].strip() or reason


def _validate_nothing(*tensors: torch.Tensor) -> None:
    """Accept all devices."""


@contextlib.contextmanager
def _same_function_modes() -> Iterator[None]:
    """Put the process's function modes back: compiled code that enters one leaves those that Dynamo saw, none."""
    before = [torch._C._get_function_stack_at(index) for index in range(torch._C._len_torch_function_stack())]
    try:
        yield
    finally:
        while torch._C._len_torch_function_stack():
            torch._C._pop_torch_function_stack()
        for mode in before:
            torch._C._push_on_torch_function_stack(mode)


def _failure(error: Exception) -> SimulationError:
    """Return the error for a model that the compiler cannot compile here."""
    error = getattr(error, "inner_exception", error)  # of Dynamo's ``BackendCompilerFailed``
    if isinstance(error, SimulationError):
        return error
    text = next(iter(str(error).splitlines()), "")
    return SimulationError(
        f"torch.compile: PyTorch's compiler failed for the simulated GPU: {type(error).__name__}: {text[:300]}\n"
        "Leave it out (train.torch_compile) to predict the eager step; `trainatomy measure` runs the compiled one"
    )


def _unsupported(options: Mapping[str, Any]) -> str | None:
    """Return which argument of ``torch.compile`` is not simulated; ``None`` if all are."""
    accepted: dict[str, tuple[Any, ...]] = {
        "backend": ("inductor",),
        "mode": (None, *MODES),
        "dynamic": (None, False),
        "fullgraph": (False, True),
        "options": (None, {}),
    }
    for name, value in options.items():
        if name == "disable" and value:
            return "disable=True"
        if name != "disable" and value not in accepted.get(name, ()):
            return f"{name}={value!r}"
    return None


def _breaks() -> dict[str, int]:
    from torch._dynamo.utils import counters

    return dict(counters["graph_break"])


def _fake_mode() -> Any:
    from torch._inductor.virtualized import V

    return V.fake_mode
