"""Compiled steps: memory of Inductor's own buffers, graph breaks, and what is refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainatomy.errors import MissingLibrary, SimulationError
from trainatomy.simulator.compiled import preload_compiler, simulated_compiler
from trainatomy.simulator.compiled.wrapper import GRAPH
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.simulator.simulate import simulate
from trainatomy.simulator.simulation import Simulation
from trainatomy.workload import Workload

Factory = Callable[..., Workload]
MODEL = """
@torch._dynamo.disable
def outside(h):
    return h + 1

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(256, 1024)
        self.last = nn.Linear(1024, 256)

    def forward(self, x):
        h = self.first(x)
        LINE
        return self.last(torch.sin(torch.nn.functional.gelu(h) * 2 + 1)).sum()

def model():
    return Net()

def batch(size):
    return {"x": torch.ones(size, 256)}
"""
ROWS = 512
TRAIN = {"per_device_train_batch_size": ROWS, "max_grad_norm": 0}
HIDDEN = ROWS * 1024 * 4
"""Bytes of the hidden layer in float32."""


def run(from_factory: Factory, line: str = "", *, compiled: bool) -> Simulation:
    workload = from_factory(MODEL.replace("LINE", line), train={"torch_compile": compiled, **TRAIN})
    return simulate(workload, workload.resolve_gpu())


def held_at_forward_end(simulation: Simulation) -> int:
    """Return the bytes of large tensors that the last step's forward pass leaves for its backward pass."""
    marks = simulation.trace.marks
    begin = next(mark for mark in reversed(marks) if mark.name == "forward").event
    end = next(mark for mark in reversed(marks) if mark.name == "forward end").event
    sizes: dict[int, int] = {}
    for kind, number, size, *_ in simulation.trace.events[begin:end]:
        if kind == "alloc":
            sizes[number] = size
        elif kind == "free":
            sizes.pop(number, None)
    return sum(size for size in sizes.values() if size >= HIDDEN)


@pytest.fixture
def triton() -> None:
    """Skip a test where Triton is missing, without which Inductor writes no code for a GPU."""
    pytest.importorskip("triton")


def test_pointwise_operations_are_recomputed_instead_of_kept(from_factory: Factory, triton: None) -> None:
    eager, compiled = run(from_factory, compiled=False), run(from_factory, compiled=True)
    assert held_at_forward_end(eager) == 3 * HIDDEN  # the inputs of gelu, of sin and of the last layer
    assert held_at_forward_end(compiled) == 2 * HIDDEN  # the result of the first layer and the input of the last one
    calls = [call.name for call in compiled.operations.calls]
    assert "inductor::fused" in calls and "aten::gelu" not in calls and "aten::mm" in calls
    gradients = [number for number, label in compiled.trace.labels.items() if label == "gradient"]
    assert len(gradients) == 2 * 4  # four parameters in two steps
    assert any("train.torch_compile is experimental" in note for note in compiled.notes)


def test_a_compiler_that_was_imported_without_triton_finds_it(
    from_factory: Factory, triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check for what torchao does: it imports the compiler before a GPU is simulated."""
    from torch._inductor import scheduler

    monkeypatch.setattr(scheduler, "has_triton", lambda: False)
    assert "inductor::fused" in [call.name for call in run(from_factory, compiled=True).operations.calls]
    assert not scheduler.has_triton()


def test_python_between_two_graphs_runs_and_is_named(from_factory: Factory, triton: None) -> None:
    before = torch.compile, torch.cuda.default_generators
    found = run(from_factory, "h = outside(h)", compiled=True)
    assert any("Dynamo breaks the model's graph" in note for note in found.notes)
    assert "aten::add" in [call.name for call in found.operations.calls]
    assert (torch.compile, torch.cuda.default_generators) == before
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).tolist() == [2, 2]


QUESTIONS = """
        assert x.device.type == "cuda" and h.is_cuda and h.get_device() == 0 and torch.cuda.is_available()
        if torch.cuda.get_device_capability(h.device) == (9, 0):
            h = torch.cos(h)
        with torch.cuda.device(h.device):
            if torch.cuda.get_device_properties(h.device).multi_processor_count == 132:
                h = torch.erf(h + torch.zeros(1024, device=h.device))
"""


SELECTING = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 1024)

    def forward(self, x, ids):
        kept = ids.to("cuda") % 4 == 0
        LINE
        return self.layer(x)[kept].sum()

def model():
    return Net()

def batch(size):
    return {"x": torch.ones(size, 256), "ids": torch.arange(size)}
"""


@pytest.mark.parametrize(("line", "rows"), [("", ROWS // 4), ("kept[0] = x.sum() > 3", ROWS)])
def test_known_values_pass_through_a_graph(from_factory: Factory, line: str, rows: int, triton: None) -> None:
    """What the graph overwrites with unknown values is unknown, and everything is selected then."""
    workload = from_factory(SELECTING.replace("LINE", line), train={"torch_compile": True, **TRAIN})
    found = simulate(workload, workload.resolve_gpu())
    assert any("Dynamic shape operator" in note for note in found.notes)
    selected = next(call for call in found.operations.calls if call.name == "aten::index")
    assert selected.outputs[0].shape == (rows, 1024)
    assert any("depends on computed values" in note for note in found.notes) == (rows == ROWS)


def test_python_that_is_traced_finds_the_gpu(from_factory: Factory, triton: None) -> None:
    found = run(from_factory, QUESTIONS, compiled=True)
    kernels = [dict(call.numbers)["kernel"] for call in found.operations.calls if call.name == "inductor::fused"]
    assert any("cos_erf" in kernel for kernel in kernels)
    assert not any("Dynamo" in note for note in found.notes)  # no broken graph, and nothing compiled twice


LIBRARY = """
import triton
import triton.language as tl

@triton.jit
def doubled(
    x,  # is read, not written
    y,
    size,
    BLOCK: tl.constexpr,
):
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + places, tl.load(x + places, mask=places < size) * 2, mask=places < size)

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        doubled[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), BLOCK=1024)
        return y

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2
"""


def test_a_librarys_kernel_in_a_compiled_graph_writes_only_its_result(from_factory: Factory, triton: None) -> None:
    model = LIBRARY + MODEL.replace("LINE", "h = Double.apply(h)")
    workload = from_factory(model, train={"torch_compile": True, **TRAIN})
    found = simulate(workload, workload.resolve_gpu())
    launch = next(call for call in found.operations.calls if call.name == "triton::kernel")
    assert [tensor.elements for tensor in launch.inputs] == [ROWS * 1024] * 2
    assert not any("clone" in str(call.numbers) for call in found.operations.calls)
    assert not any("Dynamo" in note for note in found.notes)


def test_quantised_weights_stay_operators_of_their_library(triton: None) -> None:
    pytest.importorskip("bitsandbytes")
    config = {
        "num_hidden_layers": 1,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 2,
        "vocab_size": 512,
    }
    described = {
        "model": {
            "class": "LlamaForCausalLM",
            "dtype": "bfloat16",
            "config": config,
            "quantization": {"load_in_4bit": True},
            "lora": {"r": 8, "target_modules": "all-linear"},
        },
        "data": {"sequence_length": 128},
        "train": {"per_device_train_batch_size": 8, "bf16": True, "gradient_checkpointing": False, "use_cache": False},
    }
    workload = Workload.from_mapping(described)
    eager, compiled = (
        simulate(each, each.resolve_gpu()) for each in (workload, workload.replace({"train.torch_compile": True}))
    )
    assert launches(compiled, "bitsandbytes::") == launches(eager, "bitsandbytes::") > 0
    assert not any("Dynamo breaks" in note for note in compiled.notes)


def test_flex_attention_in_a_compiled_model_is_a_kernel_of_inductors_template(triton: None) -> None:
    config = {
        "num_hidden_layers": 1,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    }
    model = {
        "class": "LlamaForCausalLM",
        "dtype": "bfloat16",
        "attn_implementation": "flex_attention",
        "config": config,
    }
    train = {"per_device_train_batch_size": 2, "torch_compile": True, "use_cache": False}
    workload = Workload.from_mapping(
        {"model": model, "data": {"sequence_length": 512}, "train": train, "loop": "pytorch"}
    )
    found = simulate(workload, workload.resolve_gpu())
    kernels = {
        call.name: [each.shape for each in call.inputs[-3:]] for call in found.operations.calls if "flex" in call.name
    }
    shapes = [(2, 4, 512, 64), (2, 2, 512, 64), (2, 2, 512, 64)]
    assert kernels == {"flex::attention": shapes, "flex::attention_backward": shapes}
    assert any("kept all blocks" in note for note in found.notes)


def launches(simulation: Simulation, start: str) -> int:
    operations = simulation.operations
    return sum(operations.calls[each.call].name.startswith(start) for each in operations.operations)


def test_a_failure_of_the_compiler_is_explained(
    from_factory: Factory, triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("trainatomy.simulator.compiled.module.put_on_gpu", fail)
    with pytest.raises(SimulationError, match=r"compiler failed.*no such kernel(.|\n)*to predict the eager step"):
        run(from_factory, compiled=True)


@pytest.mark.parametrize(
    "options",
    [{"backend": "aot_eager"}, {"mode": "fastest"}, {"options": {"max_autotune": 1}}],
)
def test_a_script_that_asks_for_more_stays_eager(process: SimulatedProcess, options: dict[str, Any]) -> None:
    model = torch.nn.Linear(2, 2)
    with simulated_compiler(process):
        assert torch.compile(model, **options) is model
    assert process.notes and f"{next(iter(options))}=" in process.notes[0] and "eager steps ran" in process.notes[0]


def test_triton_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(MissingLibrary, match=r"train.torch_compile needs triton.*pip install 'trainatomy\[compile\]'"):
        preload_compiler()


CONVOLUTIONS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        widths = (3, 128, 128, 128)
        self.layers = nn.Sequential(*(nn.Conv2d(a, b, 3, padding=1) for a, b in zip(widths, widths[1:])))

    def forward(self, x):
        return self.layers(x).sum()

def model():
    return Net()

def batch(size):
    return {"x": torch.ones(size, 3, 16, 16)}
"""


def test_convolutions_keep_the_layout_that_the_compiler_chose(
    from_factory: Factory, triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainatomy.simulator.compiled import module

    texts: list[str] = []
    load = module.load_wrapper
    monkeypatch.setattr(module, "load_wrapper", lambda text, *others: texts.append(text) or load(text, *others))
    workload = from_factory(CONVOLUTIONS, train={"torch_compile": True, "per_device_train_batch_size": 8})
    simulate(workload, workload.resolve_gpu())
    channels_last, contiguous = "(8, 128, 16, 16), (32768, 1, 2048, 128)", "(8, 128, 16, 16), (32768, 256, 16, 1)"
    assert channels_last in texts[0] and contiguous not in texts[0]


LLAMA = {
    "class": "LlamaForCausalLM",
    "config": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "vocab_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


def compiled_llama(**parts: Any) -> Simulation:
    train = {"torch_compile": True, "per_device_train_batch_size": 2, **parts.pop("train", {})}
    content = {"loop": "pytorch", "model": LLAMA, "data": {"sequence_length": 32}, "train": train, **parts}
    workload = Workload.model_validate(content)
    return simulate(workload, workload.resolve_gpu())


def graphs(simulation: Simulation, phase: str) -> int:
    return simulation.operations.python_calls.get(f"{GRAPH}.{phase}", 0)


@pytest.mark.parametrize(
    ("dynamic", "most"), [(None, 2), (True, 1), (False, 4)], ids=["from the second size on", "at once", "never"]
)
def test_sizes_that_vary_are_compiled_for_as_dynamo_does(
    closed: SimulatedProcess, triton: None, dynamic: bool | None, most: int
) -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return (x * 2 + 1).sin().sum(1)

    preload_compiler()
    with closed.open(), simulated_compiler(closed):
        closed.recorder.operations.start(0)
        compiled = torch.compile(scaled, dynamic=dynamic)
        for rows in (64, 96, 128, 160):
            compiled(torch.empty(rows, 512, device="cuda"))
    calls = closed.recorder.operations.operations.calls
    kernels = [dict(call.numbers) for call in calls if call.name == "inductor::fused"]
    assert len({kernel["kernel"] for kernel in kernels}) <= most
    assert [int(kernel["bytes"]) for kernel in kernels] == [4 * rows * 513 for rows in (64, 96, 128, 160)]
    assert any(f"({most} graphs)" in note for note in closed.notes)


def test_code_is_written_once_for_a_graph(
    from_factory: Factory, triton: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.graph import GraphLowering

    from trainatomy.simulator.compiled import kept_code

    monkeypatch.setenv(kept_code.FOLDER, str(tmp_path))
    written = []
    codegen = GraphLowering.codegen
    monkeypatch.setattr(GraphLowering, "codegen", lambda graph: written.append(graph) or codegen(graph))
    traces = []
    for _ in range(2):
        monkeypatch.setattr(kept_code, "_in_process", {})  # as in a process of its own
        traces.append(run(from_factory, compiled=True).trace)
    assert len(written) == len(list((tmp_path / "inductor").iterdir())) == 2  # forward and backward, in the first run
    assert traces[0].events == traces[1].events


def test_files_of_code_are_not_more_than_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainatomy.simulator.compiled import kept_code

    monkeypatch.setattr(kept_code, "MOST_FILES", 2)
    for number in range(4):
        kept_code._write(tmp_path, f"key{number}", b"code")
    assert len(list(tmp_path.iterdir())) == 2 and kept_code._read(tmp_path, "key3") == [b"code"]
    kept_code._write(Path("/dev/null/none"), "key", b"code")  # where nothing can be written


def test_layers_that_are_compiled_alone_share_what_was_compiled(triton: None) -> None:
    simulation = compiled_llama(train={"dynamo_use_regional_compilation": True, "use_cache": False})
    whole = compiled_llama(train={"use_cache": False})
    assert graphs(whole, "forward") == 1 and graphs(simulation, "forward") > 3
    (note,) = [note for note in simulation.notes if "train.torch_compile is experimental" in note]
    assert int(re.search(r"\((\d+) graphs\)", note)[1]) < 2 * graphs(simulation, "forward")  # type: ignore[index]


def test_what_dynamo_compiles_too_often_runs_eagerly_with_a_note(
    triton: None,
) -> None:
    """Check for a cache, which differs between layers, so that none can use what was compiled for another."""
    import torch._dynamo.config

    with torch._dynamo.config.patch(recompile_limit=2):
        simulation = compiled_llama(train={"dynamo_use_regional_compilation": True, "use_cache": True})
    assert any("compiles no function more than 2 times" in note and "layers[" in note for note in simulation.notes)
    assert "aten::silu" in {call.name for call in simulation.operations.calls}


@pytest.mark.parametrize(
    ("strategy", "collectives"),
    [("ddp", {"nccl::all_reduce"}), ("fsdp2", {"nccl::all_gather", "nccl::reduce_scatter"})],
)
def test_a_compiled_step_communicates_as_an_eager_one(triton: None, strategy: str, collectives: set[str]) -> None:
    def names(**train: Any) -> set[str]:
        simulation = compiled_llama(train={"use_cache": False, **train}, parallel={"gpus": 2, "strategy": strategy})
        return {call.name for call in simulation.operations.calls} & collectives

    regions = {"dynamo_use_regional_compilation": True} if strategy == "fsdp2" else {}
    assert names(**regions) == names(torch_compile=False) == collectives


def test_kernels_have_names_and_buffers_are_no_operations(triton: None) -> None:
    calls = compiled_llama().operations.calls
    kernels = [dict(call.numbers) for call in calls if call.name == "inductor::fused"]
    assert all(one["kernel"].startswith("triton_") and int(one["elements"]) > 0 for one in kernels)
    assert any(int(one.get("trigonometric", 0)) for one in kernels)  # of the rotary embedding
    assert not {"aten::empty_strided", "aten::as_strided"} & {call.name for call in calls}


def test_a_trainer_that_compiles_uses_tf32() -> None:
    def tf32(loop: str, **train: Any) -> bool | None:
        return Workload.model_validate({"loop": loop, "model": LLAMA, "train": train}).tf32

    assert tf32("trainer", torch_compile=True) is True
    assert tf32("trainer", torch_compile=True, tf32=False) is False
    assert tf32("trainer", torch_compile=True, fp16=True) is None
    assert tf32("trainer") is None and tf32("pytorch", torch_compile=True) is None


def test_a_note_on_a_recompilation_names_no_address_and_no_folder() -> None:
    from trainatomy.simulator.compiled.recompilations import _cause

    reason = (
        "- 0/0: ___check_obj_id(mask.__closure__[0].cell_contents.__code__, 140235472543296), type=<code object causal "
        'at 0x7f8b1d869e40, file "/home/someone/lib/masking.py", line 77>  # in forward'
    )
    assert _cause(reason) == (
        "___check_obj_id(mask.__closure__[0].cell_contents.__code__), type=<code object causal, "
        'file "masking.py", line 77>'
    )
    size = "- 0/0: tensor 'x' size mismatch at index 0. expected 4, actual 1048576"
    assert _cause(size) == "tensor 'x' size mismatch at index 0. expected 4, actual 1048576"
