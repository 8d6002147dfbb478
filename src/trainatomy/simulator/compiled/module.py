"""``torch.compile`` in a simulated process.

PyTorch's own Dynamo and AOTAutograd trace the model on meta tensors, with what CUDA runs in place of composite
functions and with CUDA's autocast; their graphs are given to Inductor as such of the GPU.  What Inductor writes around
its kernels runs in the process and allocates; kernels do nothing.  Where Dynamo breaks the graph, Python runs in the
process.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch._inductor.config
from torch import fx, nn
from torch._dynamo import guards, trace_rules, utils
from torch._dynamo.convert_frame import CatchErrorsWrapper
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.optimizer import OptimizerVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._functorch import config as functorch_config
from torch._inductor import config
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from trainatomy.errors import SimulationError
from trainatomy.simulator.compiled.device import install_compiler, tell_dynamo, text_of
from trainatomy.simulator.compiled.kept_code import kept_code
from trainatomy.simulator.compiled.known import KnownResults
from trainatomy.simulator.compiled.recompilations import Recompilations
from trainatomy.simulator.compiled.tracing import (
    FUNCTIONS,
    GPU,
    BelowFunctions,
    off_gpu,
    on_cuda,
    on_gpu,
    put_on_gpu,
    tracing_backward,
    without_function_modes,
)
from trainatomy.simulator.compiled.wrapper import Trials, load_wrapper
from trainatomy.simulator.device import DeviceProperties, SimulatedGenerator
from trainatomy.simulator.graphs import CUDAGraphs
from trainatomy.simulator.modules import without_hooks_of_all_modules
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.workload.train import CAPTURING, MODES

CAPTURES = "triton.cudagraphs"
"""Option of ``torch.compile`` with which Inductor makes CUDA graphs."""
_OURS = str(Path(__file__).parents[2])


def preload() -> None:
    """Import the compiler, and let Dynamo fill its tables of PyTorch's functions before some of them are replaced."""
    with torch._inductor.config.patch(compile_threads=1):  # no processes that would compile kernels
        import_module("torch._inductor.async_compile")
        import_module("torch._inductor.compile_fx")
    TorchInGraphFunctionVariable._get_handlers()
    trace_rules.get_torch_obj_rule_map()


class Compiler:
    """``torch.compile`` of a simulated process.

    Attributes:
        wrappers: Code around the kernels of each graph, in the order in which Inductor wrote it.
        eager: Why calls of ``torch.compile`` were left without effect.
        recompilations: What Dynamo compiled again.
        autotunes: Whether a mode measures kernels against each other.
        graphs: CUDA graphs of the process.
    """

    def __init__(self, process: SimulatedProcess, fails: Callable[[Any, SimulationError], None] | None = None) -> None:
        self.wrappers: list[str] = []
        self.eager: list[str] = []
        self.autotunes = False
        self.recompilations = Recompilations()
        self._process, self._fails = process, fails
        self._trials = Trials(process.tuning.buffer_bytes())
        self._is_called = False
        self._compile = torch.compile
        # Dynamo looks up what it compiled by its backend.
        self._backends = {captures: partial(self._backend, captures) for captures in (False, True)}
        self.graphs = CUDAGraphs(process)

    def install(self, stack: contextlib.ExitStack) -> None:
        """Replace ``torch.compile`` until ``stack`` closes."""

        def patch(target: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(target, name, value))

        patch(torch, "compile", self.compile)
        patch(torch.cuda, "default_generators", (SimulatedGenerator("cuda"),))
        patch(CatchErrorsWrapper, "__call__", self._converting(CatchErrorsWrapper.__call__))
        tell_dynamo(stack)
        self.recompilations.count(stack)
        patch(guards.CheckFunctionManager, "__init__", self._guarding(guards.CheckFunctionManager.__init__))
        patch(guards.GuardBuilder, "TORCH_FUNCTION_STATE", lambda builder, guard: None)
        patch(TensorVariable, "specialize", staticmethod(partial(_seen_on_gpu, TensorVariable.specialize)))
        patch(ConstantVariable, "as_proxy", _put_on_meta)
        patch(OptimizerVariable, "call_method", self._initialising(OptimizerVariable.call_method))
        patch(OptimizerVariable, "move_step_if_cpu", self._inside(OptimizerVariable.move_step_if_cpu))
        patch(OptimizerVariable, "_set_capturable", self._asking_for_devices(OptimizerVariable._set_capturable))
        patch(flex_attention, "_validate_device", _validate_nothing)  # which refuses meta tensors
        logger = logging.getLogger("torch._dynamo")
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)  # what it warns of is in the notes
        stack.callback(torch._C._set_cached_tensors_enabled, False)  # which graph trees enable, and leave so
        stack.callback(torch.compiler.reset)
        patch(fx.GraphModule, "print_readable", lambda module, *args, **options: "")  # for logs
        stack.callback(gc.unfreeze)
        gc.freeze()  # what was imported, which no collection need look at

    def compile(self, model: Any = None, **options: Any) -> Any:
        """Compile a module or a function; what is not simulated leaves it as it is."""
        if model is None:
            return partial(self.compile, **options)
        if (reason := _unsupported(options)) is not None:
            self.eager.append(reason)
            return model
        self.autotunes |= str(options.get("mode")).startswith("max-autotune")
        captures = options.get("mode") in CAPTURING or bool((options.get("options") or {}).get(CAPTURES))
        if isinstance(model, nn.Module):
            return OptimizedModule(model, partial(self._compiled, captures, options.get("dynamic")))  # type: ignore[arg-type]
        return self._compiled(captures, options.get("dynamic"), model)

    # -- Dynamo --------------------------------------------------------------------------------------------------------

    def _compiled(self, captures: bool, dynamic: bool | None, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is compiled when it is called, with CUDA graphs or without.

        Calls leave cycles of Python objects that hold outputs.  Python's collector, which is off in a simulation, would
        soon release them: after each call here.
        """
        compiled = self._compile(function, backend=self._backends[captures], dynamic=dynamic)
        failed = False

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal failed
            if self._is_called or failed:  # by Python between two graphs of another one
                return (function if failed else compiled)(*args, **kwargs)
            self._is_called = True
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
            return function(*args, **kwargs)

        call._torchdynamo_inline = function  # type: ignore[attr-defined]
        return call

    @contextlib.contextmanager
    def _outside(self) -> Iterator[None]:
        """Run the block outside of the process's modes, with a compiler's view of the GPU."""
        with without_function_modes(), _disable_current_modes(), contextlib.ExitStack() as stack:
            install_compiler(stack, DeviceProperties(self._process.cards))
            yield

    @contextlib.contextmanager
    def _tracing(self) -> Iterator[None]:
        """Trace what CUDA runs, with its autocast."""
        with self._process.functions.traced(FUNCTIONS), self._process.functions, BelowFunctions():
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
        types: Any = import_module("torch._dynamo.types")

        def converting(wrapper: Any, frame: Any, *args: Any) -> Any:
            if frame.f_code.co_filename.startswith(_OURS):
                skip = types.FrameExecStrategy(types.FrameAction.SKIP, types.FrameAction.SKIP)
                return types.ConvertFrameReturn(frame_exec_strategy=skip, apply_to_code=False)
            graphs = len(self.wrappers)
            with self._outside(), mock.patch.object(utils, "run_node", self._traced(utils.run_node)):
                converted = convert(wrapper, frame, *args)
            if len(self.wrappers) > graphs:
                gc.collect()
                gc.freeze()  # what compiling leaves is large, and later collections need not look at it
            return converted

        return converting

    def _guarding(self, create: Callable[..., None]) -> Callable[..., None]:
        """Return the making of guards inside of the process: a tensor's dispatch keys are checked there."""

        def guarding(*args: Any, **kwargs: Any) -> None:
            with self._process.recorder:
                create(*args, **kwargs)

        return guarding

    def _inside(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that runs inside of the process, while Dynamo compiles."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self._process.functions, self._process.recorder:
                return function(*args, **kwargs)

        return run

    def _initialising(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return Dynamo's call of a method of an optimizer, whose states are made when its step is compiled."""

        def calling(variable: Any, tx: Any, name: str, *args: Any) -> Any:
            owner = type(variable.value)
            if name != "_init_group" or not hasattr(owner, name):
                return call(variable, tx, name, *args)
            with mock.patch.object(owner, name, self._inside(getattr(owner, name))):
                return call(variable, tx, name, *args)

        return calling

    def _asking_for_devices(self, set_capturable: Callable[..., None]) -> Callable[..., None]:
        """Return what keeps steps on the GPU where the parameters are and no state is yet (``_set_capturable``)."""

        def setting(variable: Any, tx: Any) -> None:
            optimizer = variable.value
            with self._process.functions:
                for group in optimizer.param_groups:
                    if "capturable" in group and all(p.is_cuda and p not in optimizer.state for p in group["params"]):
                        group["capturable"] = True
            set_capturable(variable, tx)

        return setting

    # -- AOTAutograd and Inductor --------------------------------------------------------------------------------------

    def _backend(self, captures: bool, graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """Compile a graph of Dynamo as Inductor does."""
        aot_autograd: Any = import_module("torch._functorch.aot_autograd")
        compile_fx: Any = import_module("torch._inductor.compile_fx")

        common: Any = import_module("torch._inductor.codegen.common")
        decomposition: Any = import_module("torch._inductor.decomposition")
        known, values = KnownResults(graph), self._process.recorder.values
        create, passes = aot_autograd.create_functional_call, compile_fx._recursive_joint_graph_passes
        features, is_gpu = common.get_backend_features, decomposition.is_gpu

        def joint_passes(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
            put_on_gpu(module, _fake_mode())
            if "input_device" in kwargs:
                kwargs["input_device"] = torch.device("cpu")  # of the patterns that it looks for
            return passes(module, *args, **kwargs)

        capture: Any = import_module("torch._functorch._aot_autograd.graph_capture_wrappers")
        tagged = capture.set_partitioner_tag_is_backward
        with contextlib.ExitStack() as stack:
            for target, name, value in (
                (capture, "set_partitioner_tag_is_backward", partial(tracing_backward, tagged)),
                (aot_autograd, "create_functional_call", lambda *a, **k: self._traced(create(*a, **k))),
                (compile_fx, "_recursive_joint_graph_passes", joint_passes),
                (common, "get_backend_features", lambda device: features(on_cuda(device))),
                (decomposition, "is_gpu", lambda kind: kind == "meta" or is_gpu(kind)),
            ):
                stack.enter_context(mock.patch.object(target, name, value))
            stack.enter_context(functorch_config.patch(enable_autograd_cache=False))
            stack.enter_context(config.patch({CAPTURES: captures}))
            lower = partial(self._lower, captures)
            compiled: Callable[..., Any] = compile_fx.compile_fx(graph, inputs, inner_compile=lower)

        @wraps(compiled)
        def run(*args: Any) -> Any:
            results = tree_map(off_gpu, compiled(*args))
            known.follow(values, args, results)
            return results

        return run

    def _lower(self, captures: bool, module: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        """Let Inductor write the code of a graph, and return what runs it in the process."""
        compile_fx: Any = import_module("torch._inductor.compile_fx")
        process = self._process

        def load(text: str) -> SimpleNamespace:
            self.wrappers.append(text)
            return load_wrapper(text, self._trials, process.recorder.operations.count_call)

        def write(lowering: Any) -> Any:
            code = lowering.codegen()[0]
            return load(getattr(code, "value", code))

        mode = _fake_mode()
        with (
            self._outside(),
            mock.patch.object(GraphLowering, "compile_to_module", write),
            config.patch({"compile_threads": 1, CAPTURES: captures}),
            kept_code(text_of(DeviceProperties(process.cards)), load, writes=self._fails is None),
            self._capturing(),
        ):
            put_on_gpu(module, mode)
            may_capture = bool(options["cudagraphs"])
            try:
                code = compile_fx.compile_fx_inner(module, [on_gpu(each, mode) for each in inputs], **options)
            except Exception as error:
                raise _failure(error) from error
            if may_capture and not options["cudagraphs"]:
                reasons = getattr(code.cudagraph_info, "cudagraph_fail_reasons", None)
                self.graphs.skipped.append(f"skipping cudagraphs due to {reasons or 'code without a part for a graph'}")
            return code

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[None]:
        """Let what Inductor makes CUDA graphs of run over those of the process."""
        compile_fx: Any = import_module("torch._inductor.compile_fx")
        make = compile_fx.cudagraphify

        def cudagraphify(*args: Any, **kwargs: Any) -> Callable[..., Any]:
            made = make(*args, **kwargs)

            def run(inputs: Any) -> Any:
                with self.graphs.installed():
                    return made(inputs)

            return run

        with mock.patch.object(compile_fx, "cudagraphify", cudagraphify):
            yield


def _seen_on_gpu(specialize: Callable[[torch.Tensor], dict[str, Any]], value: torch.Tensor) -> dict[str, Any]:
    """Return what Dynamo knows of a tensor while it traces: Python asks for the device, and decides by the answer."""
    known = specialize(value)
    return known | {"device": GPU} if known["device"].type == "meta" else known


def _put_on_meta(constant: Any) -> Any:
    """Return a constant for Dynamo's graph, whose tensors are on the meta device."""
    value = constant.value
    return torch.device("meta") if isinstance(value, torch.device) and value.type == "cuda" else value


def _validate_nothing(*tensors: torch.Tensor) -> None:
    """Accept all devices."""


@contextlib.contextmanager
def _same_function_modes() -> Iterator[None]:
    """Keep the process's function modes: compiled code that enters or leaves one sets those that Dynamo saw, none."""
    kept = [torch._C._get_function_stack_at(index) for index in range(torch._C._len_torch_function_stack())]
    set_all = utils.set_torch_function_mode_stack

    def set_others(modes: list[Any]) -> None:
        set_all([*kept, *(mode for mode in modes if mode not in kept)])

    with mock.patch.object(utils, "set_torch_function_mode_stack", set_others):
        yield


def _failure(error: Exception) -> SimulationError:
    """Return the error for a model that the compiler cannot compile here."""
    error = getattr(error, "inner_exception", error)  # of Dynamo's ``BackendCompilerFailed``
    if isinstance(error, SimulationError):
        return error
    text = " ".join(line.strip() for line in str(error).splitlines()[:2])  # Dynamo explains itself in the second one
    return SimulationError(
        f"torch.compile: PyTorch's compiler failed for the simulated GPU: {type(error).__name__}: {text[:300]}\n"
        "Leave it out (train.torch_compile) to predict the eager step; `trainatomy measure` runs the compiled one"
    )


def _unsupported(options: Mapping[str, Any]) -> str | None:
    """Return which argument of ``torch.compile`` is not simulated; ``None`` if all are."""
    accepted: dict[str, tuple[Any, ...]] = {
        "backend": ("inductor",),
        "mode": (None, *MODES),
        "dynamic": (None, False, True),
        "fullgraph": (False, True),
        "options": (None, {}, {CAPTURES: False}, {CAPTURES: True}),
    }
    for name, value in options.items():
        if name == "disable" and value:
            return "disable=True"
        if name != "disable" and value not in accepted.get(name, ()):
            return f"{name}={value!r}"
    return None


def _fake_mode() -> Any:
    return V.fake_mode
