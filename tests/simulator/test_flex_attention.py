"""FlexAttention without a compiler: what it allocates, which blocks its time counts, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from trainatomy.analysis.outside_allocator import local_memory_bytes
from trainatomy.catalog.gpus import find_gpu
from trainatomy.errors import SimulationError
from trainatomy.simulator.flex.attention import Tuning
from trainatomy.simulator.flex.block_mask import kept_share
from trainatomy.simulator.flex.calls import MAY_SPILL, SPILLS
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.simulator.simulate import simulate
from trainatomy.simulator.simulation import Simulation
from trainatomy.workload import Workload

Factory = Callable[..., Workload]
LLAMA = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip
BATCH, LENGTH, HEADS, KEY_HEADS, HEAD = 2, 1024, 4, 2, 64
SUMS = BATCH * HEADS * LENGTH * 4
OUTPUT = BATCH * HEADS * LENGTH * HEAD * 2
KEYS = BATCH * KEY_HEADS * LENGTH * HEAD * 2


def run(torch_version: str = "2.11", **sections: Any) -> Simulation:
    workload = Workload.from_mapping(
        {
            "model": {
                "class": "LlamaForCausalLM",
                "config": LLAMA,
                "attn_implementation": "flex_attention",
                "dtype": "bfloat16",
                **sections.pop("model", {}),
            },
            "data": {"sequence_length": LENGTH, **sections.pop("data", {})},
            "train": {"per_device_train_batch_size": BATCH, **sections.pop("train", {})},
            "software": {"torch": torch_version},
            "gpu": "h200",
            **sections,
        }
    )
    return simulate(workload, workload.resolve_gpu())


def made(simulation: Simulation, phase: str, operation: str) -> list[int]:
    """Return the sizes of what an operation of attention allocates in a phase of the second step."""
    trace = simulation.trace
    found = []
    for event in trace.events:
        origin = trace.origins[event.allocation] if event.action == "alloc" else None
        if origin is not None and (origin.step, origin.phase, origin.operation) == (1, phase, operation):
            found.append(event.bytes)
    return found


def kept(simulation: Simulation) -> set[float]:
    calls = [call for call in simulation.operations.calls if call.name.startswith("flex::")]
    return {float(dict(call.numbers)["kept"]) for call in calls}


def test_a_step_allocates_outputs_sums_and_gradients() -> None:
    simulation = run()
    assert made(simulation, "forward", "flex::attention") == [SUMS, SUMS, OUTPUT]  # sums, maxima, output
    assert made(simulation, "backward", "flex::attention_backward") == [OUTPUT, KEYS, KEYS]
    assert made(simulation, "backward", "inductor::kernel") == [SUMS]
    assert any("FlexAttention: its kernels have the efficiency" in note for note in simulation.notes)


def test_an_older_release_copies_the_gradient_of_the_output() -> None:
    copies = {release: made(run(release), "backward", "aten::clone").count(OUTPUT) for release in ("2.11", "2.12")}
    assert copies["2.11"] == copies["2.12"] + 1  # it is laid out as [batch, length, heads, head]


def test_a_mask_has_lists_of_blocks_and_no_matrix_of_scores() -> None:
    blocks = LENGTH // 128
    lists = made(run(), "forward", "inductor::kernel")
    assert max(lists) == BATCH * blocks * blocks * 8  # counts of kept scores, in 64 bits
    assert lists.count(BATCH * blocks * 4) == 4 and lists.count(BATCH * blocks * blocks * 4) == 4


def test_kernels_are_tried_in_the_first_step_with_a_buffer_of_the_l2_cache() -> None:
    trace = run().trace
    buffers = [event for event in trace.events if trace.origins[event.allocation].operation == "inductor::tuning"]
    assert {event.bytes for event in buffers if event.action == "alloc"} == {62_914_560}
    assert {trace.origins[event.allocation].step for event in buffers} == {0}
    assert {trace.origins[event.allocation].phase for event in buffers} == {"forward", "backward"}
    assert [event.action for event in buffers] == ["alloc", "free"] * (len(buffers) // 2)


def test_a_kernel_is_tried_for_two_sizes(process: SimulatedProcess) -> None:
    tuning = Tuning(lambda: 1 << 20)
    with process.open():
        for length in (8, 8, 16, 8, 32):
            tuning.call("cast", torch.empty(length, device="cuda"))
    assert [event.bytes for event in process.trace.events].count(1 << 20) == 2


def test_lists_of_a_mask_are_released_in_backward() -> None:
    trace = run().trace
    lists = {
        number
        for number, origin in enumerate(trace.origins)
        if (origin.step, origin.module, origin.operation) == (1, "model", "inductor::kernel")
    }
    last = max(
        index for index, event in enumerate(trace.events) if event.action == "free" and event.allocation in lists
    )
    assert any(
        event.action == "alloc" and trace.origins[event.allocation][2:] == ("backward", 1)
        for event in trace.events[last:]
    )


@pytest.mark.parametrize("padding", [False, True])
def test_a_mask_that_reads_a_tensor_spills_registers(padding: bool) -> None:
    simulation = run(data={"padding": padding})
    assert (SPILLS in simulation.notes) is padding
    assert simulation.stack_bytes == (2960 if padding else 0)


def test_wide_heads_spill_none() -> None:
    simulation = run(data={"padding": True}, model={"config": {**LLAMA, "hidden_size": 512}})
    assert simulation.stack_bytes == 0


def test_a_mask_on_a_gpu_whose_kernels_are_not_known_is_noted() -> None:
    simulation = run(data={"padding": True}, gpu="a100-80gb")
    assert MAY_SPILL in simulation.notes
    assert simulation.stack_bytes == 0


def test_local_memory_is_what_an_h200_held() -> None:
    """NVML's used memory after the first launch of the kernels of BERT and of a Llama (torch 2.11, 2026-11-24)."""
    gpu = find_gpu("h200")
    assert [local_memory_bytes(stack, gpu) for stack in (0, 1024, 2944, 2960)] == [0, 0, 520_093_696, 524_288_000]


def test_recomputation_runs_forward_again() -> None:
    simulation = run(train={"gradient_checkpointing": True})
    assert made(simulation, "recompute", "flex::attention") == [SUMS, SUMS, OUTPUT]


def test_time_counts_the_blocks_that_a_mask_keeps() -> None:
    blocks = LENGTH // 128
    assert kept(run()) == {(blocks + 1) / (2 * blocks)}  # on and below the diagonal


@pytest.mark.parametrize("window", [128, 300])
def test_a_window_keeps_the_blocks_that_it_crosses(window: int) -> None:
    """Check the share against the mask of all scores."""
    positions = torch.arange(LENGTH)
    seen = (positions[:, None] >= positions) & (positions[:, None] - positions < window)
    share = seen.view(LENGTH // 128, 128, LENGTH // 128, 128).any(3).any(1).float().mean().item()

    def inside(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k < window)

    mask = create_block_mask(inside, 1, None, LENGTH, LENGTH, device="cpu")
    assert kept_share(mask, lambda tensor: None) == pytest.approx(share)


def test_padding_leaves_blocks_out() -> None:
    rows = torch.ones(1, 256, dtype=torch.bool)
    rows[0, 100:] = False

    def not_padded(b: Any, h: Any, q: Any, k: Any) -> Any:
        return rows[b, k]

    mask = create_block_mask(not_padded, 1, None, 256, 256, device="cpu")
    assert kept_share(mask, lambda tensor: None) == 0.5


MODULE = """
from torch.nn.attention.flex_attention import flex_attention, create_block_mask
BEFORE = torch.compile(flex_attention)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(256, 3 * 256)

    def forward(self, x):
        q, k, v = self.project(x).view(*x.shape[:2], 3, 4, 64).permute(2, 0, 3, 1, 4)
        return CALL.sum()

def model():
    return Net()

def batch(size):
    return {"x": torch.ones(size, 256, 256)}
"""


def own(from_factory: Factory, call: str) -> Simulation:
    workload = from_factory(MODULE.replace("CALL", call), train={"per_device_train_batch_size": 2}, gpu="h200")
    return simulate(workload, workload.resolve_gpu())


SCORES = 2 * 4 * 256 * 256 * 4


@pytest.mark.parametrize("call", ["torch.compile(flex_attention)(q, k, v)", "BEFORE(q, k, v)"])
def test_a_module_that_compiles_it(from_factory: Factory, call: str) -> None:
    simulation = own(from_factory, call)
    assert made(simulation, "forward", "flex::attention")[-1] == 2 * 4 * 256 * 64 * 4
    assert SCORES not in [event.bytes for event in simulation.trace.events]


@pytest.mark.parametrize("score", ["None", "lambda score, b, h, q, k: score * 0.5 + (q - k)"])
def test_a_module_that_does_not_compile_it_writes_the_scores(from_factory: Factory, score: str) -> None:
    simulation = own(from_factory, f"flex_attention(q, k, v, score_mod={score})")
    sizes = [event.bytes for event in simulation.trace.events if event.action == "alloc"]
    assert sizes.count(SCORES) > 4
    assert "flex::attention" not in [call.name for call in simulation.operations.calls]


def test_heads_that_its_kernel_lacks_are_refused(process: SimulatedProcess) -> None:
    small = torch.empty(1, 2, 256, 8, device="cuda")
    with pytest.raises(SimulationError, match="needs heads of at least 16, found 8"):
        torch.compile(flex_attention)(small, small, small)


def test_scores_with_trained_tensors_are_refused(process: SimulatedProcess) -> None:
    bias = torch.empty(256, device="cuda", requires_grad=True)
    query = torch.empty(1, 2, 256, 64, device="cuda")
    with pytest.raises(SimulationError, match="score_mod that uses bias, a tensor that needs gradients"):
        torch.compile(flex_attention)(query, query, query, score_mod=lambda s, b, h, q, k: s + bias[q])


def test_cuda_graphs_are_refused(process: SimulatedProcess) -> None:
    with pytest.raises(SimulationError, match="mode='reduce-overhead'"):
        torch.compile(flex_attention, mode="reduce-overhead")
    with pytest.raises(SimulationError, match=r"options=\{'triton.cudagraphs': True\}"):
        torch.compile(flex_attention, options={"max_autotune": True, "triton.cudagraphs": True})


def test_options_that_only_tune_its_kernels_allocate_the_same(process: SimulatedProcess) -> None:
    """As torchtitan compiles it."""
    options = {"max_autotune": True, "coordinate_descent_tuning": True, "wrap_inductor_compiled_regions": True}
    query = torch.empty(1, 2, 256, 64, device="cuda", requires_grad=True)
    compiled: Any = torch.compile(flex_attention, options={**options, "triton.cudagraphs": False})
    assert compiled(query, query, query).shape == query.shape


def test_unknown_values_of_a_mask_are_assumed(process: SimulatedProcess) -> None:
    documents = torch.empty(1, 256, dtype=torch.int64, device="cuda")

    def same(b: Any, h: Any, q: Any, k: Any) -> Any:
        return documents[b, q] == documents[b, k]

    mask = torch.compile(create_block_mask)(same, 1, None, 256, 256, device="cuda")
    query = torch.empty(1, 2, 256, 64, device="cuda")
    torch.compile(flex_attention)(query, query, query, block_mask=mask)
    assert any("a mask depends on values that are not known" in note for note in process.notes)


def test_everything_is_put_back(closed: SimulatedProcess) -> None:
    before = torch.compile
    with closed.open():
        assert torch.compile is not before
    assert torch.compile is before
