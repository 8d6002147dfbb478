"""The operations of the last step as on a GPU, and their FLOP compared with ``FlopCounterMode``."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from trainatomy.results.operations import CAST_FROM, Call, Operations
from trainatomy.simulator import simulate as simulating
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.simulator.simulate import simulate
from trainatomy.timing.launch import checkpointed_regions
from trainatomy.training.batch import build_batch
from trainatomy.training.model import build_model
from trainatomy.workload import Workload

Factory = Callable[..., Workload]
_TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_LLAMA = {**_TEXT, "num_key_value_heads": 1, "vocab_size": 200}
MODELS: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": {**_TEXT, "vocab_size": 200},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 200},
    "LlamaForCausalLM": _LLAMA,
    "T5ForConditionalGeneration": {
        "d_model": 32,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 2,
        "vocab_size": 200,
    },
    "ViTForImageClassification": {**_TEXT, "image_size": 32, "patch_size": 8},
    "ResNetForImageClassification": {
        "embedding_size": 8,
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "layer_type": "basic",
    },
    "MixtralForCausalLM": {**_LLAMA, "num_local_experts": 4},
}
WITHOUT_ATTENTION = {"ResNetForImageClassification"}


def workload(name: str, attention: str | None = None, **train: Any) -> Workload:
    data = {} if "Image" in name else {"sequence_length": 16}
    how = {} if attention is None or name in WITHOUT_ATTENTION else {"attn_implementation": attention}
    model = {"class": name, "config": MODELS[name], **how}
    settings = {"per_device_train_batch_size": 2, "max_grad_norm": 0, "optim": "sgd", **train}
    return Workload.from_mapping(
        {"loop": "pytorch", "model": model, "data": data, "train": settings, "gpu": "h200", "steps": 2}
    )


def operations_of(described: Workload) -> Operations:
    return simulate(described, described.resolve_gpu()).operations


def flop(operations: Operations, *phases: str) -> int:
    rows = (o for o in operations.operations if o.phase in phases)
    return sum((operations.calls[o.call].flop or 0) * o.repeats for o in rows)


def names(operations: Operations, *phases: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for row in operations.operations:
        if not phases or row.phase in phases:
            found[operations.calls[row.call].name] += row.repeats
    return found


def called(operations: Operations, name: str) -> list[Call]:
    return [operations.calls[o.call] for o in operations.operations if operations.calls[o.call].name == name]


@pytest.mark.parametrize("name", [n for n in MODELS if n != "MixtralForCausalLM"])
def test_flop_are_those_of_flop_counter_mode_on_the_plain_model(name: str) -> None:
    described = workload(name, "eager")
    model, batch = build_model(described).train(), build_batch(described, build_model(described))
    with FlopCounterMode(display=False) as forward:
        loss = model(**batch).loss
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    found = operations_of(described)
    assert flop(found, "forward") == forward.get_total_flops() > 0
    assert flop(found, "backward") == backward.get_total_flops() > 0


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("BertForMaskedLM", "eager"),
        ("BertForMaskedLM", "sdpa"),
        ("LlamaForCausalLM", "sdpa"),
        ("ViTForImageClassification", "sdpa"),
        ("MixtralForCausalLM", "eager"),
    ],
)
def test_flop_are_those_of_flop_counter_mode_over_the_same_kernels(
    name: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run PyTorch's counter and the recorder together: GPU attention kernels, and two equal steps."""
    described, run = workload(name, attention, bf16=True), simulating.run
    counter = FlopCounterMode(display=False)

    def counted(*arguments: Any, **keywords: Any) -> None:
        with counter:
            run(*arguments, **keywords)

    monkeypatch.setattr(simulating, "run", counted)
    found = operations_of(described)
    assert flop(found, "forward", "backward", "other", "optimizer") * 2 == counter.get_total_flops() > 0
    if attention == "sdpa":
        fused = [name for name in names(found).elements() if re.search("_scaled_dot_product_.*_backward", name)]
        assert len(fused) == 2


def test_attention_in_one_kernel_counts_as_the_products_it_is_made_of() -> None:
    forward = [flop(operations_of(workload("BertForMaskedLM", how)), "forward") for how in ("eager", "sdpa")]
    assert forward[0] == forward[1]


NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)

    def forward(self, x):
        h = self.first(x).relu()
        return (self.second(h) + h).sum()

def model():
    return Net()

def batch(size):
    return {"x": torch.ones(size, 8)}
"""


def test_a_step_in_order(from_factory: Factory) -> None:
    found = operations_of(from_factory(NET))
    assert found.step == 1
    run = [found.calls[o.call] for o in found.operations if o.phase == "forward"]
    kernels = [call.name.removeprefix("aten::") for call in run if not call.is_view]
    assert kernels == ["addmm", "relu", "addmm", "add", "sum"]
    assert {o.module for o in found.operations if found.calls[o.call].name == "aten::addmm"} == {"first", "second"}
    assert {o.module for o in found.operations if found.calls[o.call].name == "aten::mm"} == {"first", "second"}
    assert [o.event for o in found.operations] == sorted(o.event for o in found.operations)
    assert found.module_calls == {"forward": 3}


def test_the_batch_is_copied_from_the_cpu(from_factory: Factory) -> None:
    found = operations_of(from_factory(NET))
    copies = [call for call in called(found, "aten::_to_copy") if call.inputs[0].on_host]
    assert [(call.inputs[0].shape, call.outputs[0].on_host) for call in copies] == [((8, 8), False)]


@pytest.mark.parametrize(
    ("line", "name"), [("self.second(h) + self.first(h)", "aten::add_"), ("self.second(h) + h", "aten::add")]
)
def test_the_engine_adds_in_place_only_without_other_references(from_factory: Factory, line: str, name: str) -> None:
    """Add two gradients of ``h`` (8 x 8): a product may be overwritten, that of ``+ h`` is a shared view of ones."""
    found = operations_of(from_factory(NET.replace("self.second(h) + h", line)))
    backward = [found.calls[o.call] for o in found.operations if o.phase == "backward"]
    added = [call for call in backward if "add" in call.name and call.outputs[0].shape == (8, 8)]
    assert name in {call.name for call in added}
    for call in added:
        in_place = call.name == "aten::add_"
        assert (call.outputs[0].storage == call.inputs[0].storage) == in_place == (call.written == (0,))


def test_equal_calls_are_merged() -> None:
    found = operations_of(workload("BertForMaskedLM"))
    assert len(set(found.calls)) == len(found.calls) < len(found.operations) / 3


def test_lists_and_numbers(from_factory: Factory) -> None:
    found = operations_of(from_factory(NET, train={"optim": "adamw_torch_fused"}))
    decayed, update = called(found, "aten::_fused_adamw_")
    assert update.lengths == (2, 2, 2, 2, 0, 2)  # biases; gradients, both moments, no maxima, steps
    assert [array.shape for array in decayed.inputs[:2]] == [(8, 8), (8, 8)]
    assert dict(update.numbers)["lr"] == "5e-05" and not update.outputs
    assert update.written == tuple(range(8))


def test_micro_batches_that_are_not_executed_are_repeats(from_factory: Factory) -> None:
    found = operations_of(from_factory(NET, train={"gradient_accumulation_steps": 9}))
    assert names(found, "forward")["aten::addmm"] == 2 * 9
    assert {o.micro_step: o.repeats for o in found.operations if o.phase == "forward"} == {0: 1, 1: 1, 2: 6, 8: 1}
    assert names(found)["aten::_to_copy"] == 9
    assert found.module_calls == {"forward": 3 * 9}


def test_the_trainers_placeholder_is_not_an_operation() -> None:
    described = workload("BertForMaskedLM").to_mapping()
    described |= {"loop": "trainer", "train": {**described["train"], "gradient_accumulation_steps": 6}}  # type: ignore[dict-item]
    found = operations_of(Workload.from_mapping(described))
    assert names(found, "other")["aten::zeros"] == 0


def test_recomputation_is_a_phase() -> None:
    found = operations_of(workload("BertForMaskedLM", gradient_checkpointing=True))
    assert 0 < flop(found, "recompute") < flop(found, "forward")
    assert found.module_calls["recompute"] > 0
    hooks = found.python_calls
    assert hooks["_checkpoint_hook.forward"] == hooks["_recomputation_hook.recompute"] > 0
    assert found.parameters > found.modules // 2 > 0


@pytest.mark.parametrize(("loop", "reentrant"), [("trainer", False), ("pytorch", True)])
def test_every_nth_layer_is_recomputed(loop: str, reentrant: bool) -> None:
    regions, work = [], []
    for every in (1, 3, 6):
        kwargs = {"use_reentrant": reentrant, "every_n_layers": every}
        described = workload("LlamaForCausalLM", gradient_checkpointing=True, gradient_checkpointing_kwargs=kwargs)
        found = operations_of(described.replace({"model.config.num_hidden_layers": 5, "loop": loop}))
        regions.append(checkpointed_regions(found))
        work.append(flop(found, "recompute"))
    assert regions == [5, 2, 1]
    assert [5 * each for each in work] == [count * work[0] for count in regions]


def test_gradients_that_are_zeroed() -> None:
    described = Workload.from_mapping({**workload("BertForMaskedLM").to_mapping(), "zero_grad_set_to_none": False})
    found = operations_of(described)
    assert set(names(found, "zero_grad")) == {"aten::zero_"}
    assert {call.written for call in called(found, "aten::zero_")} == {(0,)}


def test_a_read_by_the_cpu_is_recorded(from_factory: Factory) -> None:
    found = operations_of(from_factory(NET.replace("return (", "return self.first.weight.sum().item() * (")))
    (read,) = [o for o in found.operations if found.calls[o.call].name == "aten::_local_scalar_dense"]
    assert read.phase == "forward" and not found.calls[read.call].inputs[0].on_host


def test_kernels_that_are_simulated_are_one_operation(from_factory: Factory) -> None:
    norm = NET.replace("self.second = nn.Linear(8, 8)", "self.second = nn.RMSNorm(8)")
    found = operations_of(from_factory(norm))
    (forward,) = called(found, "aten::_fused_rms_norm")
    (backward,) = called(found, "aten::_fused_rms_norm_backward")
    assert [array.shape for array in forward.outputs] == [(8, 8), (8, 1)]
    assert [array.shape for array in backward.inputs] == [(8, 8), (8, 8), (8, 1), (8,)]
    assert not called(found, "aten::empty_like")
    modules = {o.module for o in found.operations if "rms" in found.calls[o.call].name}
    assert modules == {"second"}


def test_results_lie_in_allocations_of_the_trace(from_factory: Factory) -> None:
    described = from_factory(NET)
    simulation = simulate(described, described.resolve_gpu())
    found = simulation.operations
    for row in found.operations:
        call = found.calls[row.call]
        if call.name == "aten::addmm":
            (number,) = row.outputs
            assert simulation.trace.origins[number].operation == "aten::addmm"
            assert simulation.trace.events[row.event].allocation == number


def test_only_the_last_step_is_kept_and_no_tensor_is_kept_alive(from_factory: Factory) -> None:
    described = from_factory(NET)
    two, three = (operations_of(described.model_copy(update={"steps": steps})) for steps in (2, 3))
    assert (two.step, three.step) == (1, 2)
    assert [two.calls[o.call] for o in two.operations] == [three.calls[o.call] for o in three.operations]


def test_a_call_records_which_arguments_are_the_same_tensor(process: Any) -> None:
    writer = process.recorder.operations
    writer.start(0)
    x = torch.ones(4, 4, device="cuda")
    x * x
    x[:2] * x[2:]
    same, halves = called(writer.operations, "aten::mul")
    assert same.inputs[0].storage == same.inputs[1].storage and same.inputs[0].part == same.inputs[1].part
    assert halves.inputs[0].storage == halves.inputs[1].storage and halves.inputs[0].part != halves.inputs[1].part
    assert same.pointwise and not same.is_view
    assert all(call.is_view for call in called(writer.operations, "aten::slice"))


def test_a_norm_says_that_the_operation_before_has_cast_its_input(process: SimulatedProcess) -> None:
    """As under autocast; not where another kernel ran in between, or where nothing is cast."""
    half = torch.randn(2, 8, 16, device="cuda", dtype=torch.float16)
    operations = process.recorder.operations
    operations.start(1)
    with torch.autocast("cuda", dtype=torch.float16):
        functional.group_norm(half, 1)
    whole = half.float()
    functional.group_norm(whole.view(2, 8, 16), 1)
    whole = half.float()
    whole.add_(1)
    functional.group_norm(whole, 1)
    norms = called(operations.operations, "aten::native_group_norm")
    assert [(CAST_FROM, "2") in call.numbers for call in norms] == [True, True, False]
