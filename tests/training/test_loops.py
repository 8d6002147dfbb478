"""The loops on the CPU: real steps of tiny models of every family, with observer events in the documented order."""

from __future__ import annotations

import gc
import sys
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainatomy.errors import FactoryError, MissingLibrary, WorkloadError
from trainatomy.training.arguments import training_arguments
from trainatomy.training.batch import build_dataset
from trainatomy.training.model import build_model
from trainatomy.training.observer import Observer
from trainatomy.training.process import preload
from trainatomy.training.run import run
from trainatomy.workload.arguments import arguments, module_of
from trainatomy.workload.schema import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LOOPS = ("trainer", "pytorch")


class EventRecorder(Observer):
    """Records the observer's events and checks the state inside the loop."""

    def __init__(self) -> None:
        self.entries: list[str] = []
        self.losses: list[float] = []

    def loaded(self, model: Any) -> None:
        self.entries.append("loaded")

    def ready(self, model: Any, optimizer: Any) -> None:
        self.entries.append("ready")
        self.model, self.optimizer = model, optimizer

    def step_begin(self, step: int) -> None:
        self.entries.append(f"step {step}")

    def micro_step_begin(self, micro_step: int) -> None:
        self.entries.append(f"micro {micro_step}")

    def forward_end(self) -> None:
        self.entries.append("forward end")

    def micro_step_end(self, micro_step: int) -> None:
        self.entries.append(f"micro {micro_step} end")
        if self.optimizer is not None:
            assert any(parameter.grad is not None for parameter in self.model.parameters())

    def optimizer_begin(self) -> None:
        self.entries.append("optimizer")
        assert any(parameter.grad is not None for parameter in self.model.parameters())

    def optimizer_end(self) -> None:
        self.entries.append("optimizer end")

    def zero_grad_begin(self) -> None:
        self.entries.append("zero")

    def zero_grad_end(self) -> None:
        self.entries.append("zero end")

    def step_end(self, step: int) -> None:
        self.entries.append(f"step {step} end")


def run_recorded(workload: Workload, steps: int = 2) -> EventRecorder:
    """Run ``workload`` on the CPU and return the recorder of its events and losses."""
    torch.manual_seed(0)
    model = build_model(workload)
    recorder = EventRecorder()

    def keep(module: Any, arguments: Any, outputs: Any) -> None:
        if isinstance(outputs, dict) and outputs.get("loss") is not None:
            recorder.losses.append(outputs["loss"].item())

    model.register_forward_hook(keep)
    run(workload, model, device="cpu", steps=steps, observer=recorder)
    return recorder


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "GPT2LMHeadModel"])
def test_the_trainer_smooths_labels(describe: Any, name: str) -> None:
    recorder = run_recorded(describe(name, train={"label_smoothing_factor": 0.1}))
    assert recorder.optimizer.state
    assert recorder.entries[-1] == "step 1 end"


@pytest.mark.parametrize("loop", LOOPS)
def test_every_family_runs_two_steps(describe: Any, family: str, loop: str) -> None:
    recorder = run_recorded(describe(family, loop=loop))
    assert len(recorder.losses) == 2
    assert all(torch.isfinite(torch.tensor(recorder.losses)))
    assert recorder.optimizer.state  # the optimizer has stepped
    assert recorder.entries[-1] == "step 1 end"


@pytest.mark.parametrize("loop", LOOPS)
def test_the_observer_receives_all_events_in_order(describe: Any, loop: str) -> None:
    recorder = run_recorded(describe(loop=loop, train={"gradient_accumulation_steps": 2}))
    micro = [f"micro {i}{end}" for i in range(2) for end in ("", " end")]
    micro = [*micro[:1], "forward end", *micro[1:3], "forward end", *micro[3:]]
    after = ["optimizer", "optimizer end", "zero", "zero end"]
    before = ["zero", "zero end"] if loop == "trainer" else []
    steps = [entry for i in range(2) for entry in (f"step {i}", *micro, *after, f"step {i} end")]
    assert recorder.entries == ["loaded", "ready", *before, *steps]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_are_released_or_filled_with_zeros(describe: Any, loop: str, to_none: bool) -> None:
    model = {"freeze": ["*.embeddings.*"]}
    recorder = run_recorded(describe(loop=loop, zero_grad_set_to_none=to_none, model=model))
    trained = {parameter.grad is None for parameter in recorder.model.parameters() if parameter.requires_grad}
    assert trained == {to_none}


@pytest.mark.parametrize("loop", LOOPS)
def test_mixed_precision_accumulation_and_checkpointing_work_together(describe: Any, loop: str) -> None:
    train = {"bf16": True, "gradient_checkpointing": True, "gradient_accumulation_steps": 2}
    recorder = run_recorded(describe("LlamaForCausalLM", loop=loop, train=train))
    assert len(recorder.losses) == 4
    assert {parameter.dtype for parameter in recorder.model.parameters()} == {torch.float32}


def test_the_plain_loop_scales_gradients(describe: Any) -> None:
    recorder = run_recorded(describe(loop="pytorch", train={"fp16": True}))
    assert all(parameter.isfinite().all() for parameter in recorder.model.parameters())


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("checkpointing", [True, False])
def test_adapters_are_updated_and_the_rest_is_not(describe: Any, loop: str, checkpointing: bool) -> None:
    model = {"lora": {"r": 2, "target_modules": ["q_proj"]}}
    train = {"gradient_checkpointing": checkpointing}
    workload = describe("LlamaForCausalLM", loop=loop, model=model, train=train)
    recorder = run_recorded(workload)
    torch.manual_seed(0)
    before = dict(build_model(workload).named_parameters())
    changed = {name for name, value in recorder.model.named_parameters() if not torch.equal(value, before[name])}
    assert changed == {name for name, value in before.items() if value.requires_grad}


@pytest.mark.parametrize(
    ("optim", "optim_args", "state", "defaults"),
    [
        ("adamw_torch_fused", None, {"step", "exp_avg", "exp_avg_sq"}, {"fused": True}),
        ("adamw_torch", "foreach=True", {"step", "exp_avg", "exp_avg_sq"}, {"foreach": True}),
        ("adamw_torch", "foreach=False,amsgrad=True", {"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"}, {}),
        ("sgd", None, set(), {"momentum": 0}),
        ("sgd", "momentum=0.9", {"momentum_buffer"}, {"momentum": 0.9}),
        ("adafactor", None, {"step", "exp_avg_sq_row", "exp_avg_sq_col", "RMS"}, {}),
        ("adagrad", None, {"step", "sum"}, {}),
    ],
)
@pytest.mark.parametrize("loop", LOOPS)
def test_optimizers_are_those_of_the_trainer(
    describe: Any, loop: str, optim: str, optim_args: str | None, state: set[str], defaults: dict[str, Any]
) -> None:
    recorder = run_recorded(describe(loop=loop, train={"optim": optim, "optim_args": optim_args, "weight_decay": 0.1}))
    matrix = recorder.model.classifier.weight
    held = {name for name, value in recorder.optimizer.state[matrix].items() if value is not None}
    assert held == state
    assert {name: recorder.optimizer.defaults[name] for name in defaults} == defaults
    decayed, spared = recorder.optimizer.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    names = {id(parameter): name for name, parameter in recorder.model.named_parameters()}
    assert all("bias" in names[id(p)] or "LayerNorm" in names[id(p)] for p in spared["params"])


@pytest.mark.parametrize(
    ("train", "error", "words"),
    [
        ({"optim": "paged_adamw_8bit"}, MissingLibrary, "pip install bitsandbytes"),
        ({"optim": "adamw_torch", "optim_args": "forech=True"}, WorkloadError, "did you mean foreach"),
        ({"optim_args": "foreach=True"}, WorkloadError, "use adamw_torch"),
    ],
)
@pytest.mark.parametrize("loop", LOOPS)
def test_missing_requirements_of_an_optimizer_are_reported(
    describe: Any, monkeypatch: pytest.MonkeyPatch, loop: str, train: Any, error: type[Exception], words: str
) -> None:
    monkeypatch.setattr("transformers.trainer_optimizer.is_bitsandbytes_available", lambda: False)
    with pytest.raises(error, match=words):
        run_recorded(describe(loop=loop, train=train))


@pytest.mark.parametrize("loop", LOOPS)
def test_checkpointing_of_a_model_that_has_none_is_refused(describe: Any, loop: str) -> None:
    with pytest.raises(WorkloadError, match=r"train\.gradient_checkpointing: ResNet"):
        run_recorded(describe("ResNetForImageClassification", loop=loop, train={"gradient_checkpointing": True}))


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "WhisperForConditionalGeneration"])
def test_inference_runs_the_forward_alone(describe: Any, name: str) -> None:
    recorder = run_recorded(describe(name, mode="inference", train={"bf16_full_eval": True}))
    step = ["micro 0", "forward end", "micro 0 end"]
    assert recorder.entries == ["loaded", "ready", "step 0", *step, "step 0 end", "step 1", *step, "step 1 end"]
    assert not recorder.losses
    assert {parameter.dtype for parameter in recorder.model.parameters()} == {torch.bfloat16}
    assert all(parameter.grad is None for parameter in recorder.model.parameters())


def test_tf32_is_set_for_inference_and_put_back(describe: Any) -> None:
    before = torch.backends.fp32_precision
    seen: list[str] = []
    workload = describe(mode="inference", train={"tf32": True})
    model = build_model(workload)
    model.register_forward_pre_hook(lambda module, arguments: seen.append(torch.backends.fp32_precision))
    run(workload, model, device="cpu", steps=1, observer=Observer())
    assert (seen, torch.backends.fp32_precision) == (["tf32"], before)


def test_a_machine_of_several_gpus_trains_on_one(describe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)  # a CUDA build asks the driver
    assert training_arguments(describe(), steps=1, output_dir="unused", use_cpu=False).train_batch_size == 2


USER = """
from types import SimpleNamespace

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2))
        self.body(torch.zeros(2, 3, 8, 8))
        self.wrap = wrap

    def forward(self, image, target):
        return self.wrap(nn.functional.cross_entropy(self.body(image), target))


def tensor(): return Net(lambda loss: loss)
def mapping(): return Net(lambda loss: {"loss": loss, "logits": loss})
def attribute(): return Net(lambda loss: SimpleNamespace(loss=loss))
def nothing(): return Net(lambda loss: {"logits": loss})
def vector(): return Net(lambda loss: loss.repeat(3))
def broken(): return Net(lambda loss: loss + torch.zeros(2) + torch.zeros(3))


def batch(size):
    return {"image": torch.rand(size, 3, 8, 8), "target": torch.zeros(size, dtype=torch.long)}
"""


@pytest.fixture
def user(tmp_path: Path) -> Path:
    file = tmp_path / "user.py"
    file.write_text(USER)
    return file


def own(file: Path, build: str, **sections: Any) -> Workload:
    sections = {"data": {"factory": f"{file}:batch"}, "train": {"per_device_train_batch_size": 2}, **sections}
    return Workload.from_mapping({"model": {"factory": f"{file}:{build}"}, **sections})


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("build", ["tensor", "mapping", "attribute"])
def test_any_module_that_gives_its_loss_is_trained(user: Path, loop: str, build: str) -> None:
    recorder = run_recorded(own(user, build, loop=loop))
    assert recorder.optimizer.state
    assert len(recorder.model._forward_hooks) == 1  # the hook of this test; the one that looks for the loss was removed


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize(
    ("build", "words"),
    [("nothing", "must return the loss"), ("vector", r"shape \(3,\)"), ("broken", r"user\.py:\d+, in <lambda>")],
)
def test_a_model_without_a_loss_is_a_user_error(user: Path, loop: str, build: str, words: str) -> None:
    with pytest.raises(FactoryError, match=words):
        run_recorded(own(user, build, loop=loop))


@pytest.mark.parametrize("sections", [{"loop": "trainer"}, {"loop": "pytorch"}, {"mode": "inference"}])
def test_a_function_can_make_the_batches(describe: Any, sections: Any) -> None:
    workload = describe(**sections)
    model = build_model(workload)
    sizes: list[int] = []

    def make(size: int) -> dict[str, torch.Tensor]:
        sizes.append(size)
        return {"input_ids": torch.ones(size, 5, dtype=torch.int64), "labels": torch.zeros(size, dtype=torch.int64)}

    run(workload, model, device="cpu", steps=1, observer=Observer(), make_batch=make)
    assert sizes == [2]


def test_libraries_of_a_run_can_be_imported_first(describe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    preload(describe())
    assert "transformers.trainer" in sys.modules
    assert "torch._dynamo" in sys.modules
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(MissingLibrary, match="pip install accelerate"):
        preload(describe())
    preload(describe(mode="inference"))


@pytest.mark.parametrize("optim", [name for name, package in arguments().optimizers.items() if package])
def test_the_library_that_an_optimizer_misses_is_named(
    describe: Any, monkeypatch: pytest.MonkeyPatch, optim: str
) -> None:
    """That of the optimizer itself, although some need others in turn."""
    package = arguments().optimizers[optim]
    assert package is not None
    for name in {module_of(package), "bitsandbytes"}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingLibrary, match=f"{optim} needs {module_of(package)}, .* pip install {package}"):
        preload(describe(train={"optim": optim}))


class Lifetimes(TorchDispatchMode):
    """Records each operation's name and the bytes allocated by operations that are alive after it."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.history: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(outputs):
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage())
        self.history.append((str(function), sum(self.alive.values())))
        return outputs

    def _watch(self, storage: Any) -> None:
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = storage.nbytes()
            weakref.finalize(storage, self.alive.pop, key, None)


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable garbage collection so that only reference counts decide which tensors are alive."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_lifetimes_see_what_is_released() -> None:
    with Lifetimes() as lifetimes:
        first = torch.ones(100)
        second = first + 1
        del second
        third = first.view(10, 10) * 2
        del first, third
        torch.ones(1)
    assert [alive for _, alive in lifetimes.history] == [400, 800, 400, 800, 4]


@pytest.mark.parametrize(
    "train", [{}, {"bf16": True, "gradient_accumulation_steps": 2, "gradient_checkpointing": True}]
)
@pytest.mark.parametrize("name", ["BertForSequenceClassification", "LlamaForCausalLM"])
def test_watching_the_trainer_changes_no_operation_and_no_lifetime(describe: Any, name: str, train: Any) -> None:
    import transformers

    workload = describe(name, train=train)

    def plain(model: Any) -> None:
        samples = 2 * 2 * workload.train.gradient_accumulation_steps
        arguments = training_arguments(workload, steps=2, output_dir="unused", use_cpu=True)
        dataset = build_dataset(workload, model, samples)
        trainer = transformers.Trainer(model, arguments, train_dataset=dataset, data_collator=dataset.collate)
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()

    def watched(model: Any) -> None:
        run(workload, model, device="cpu", steps=2, observer=Observer())

    histories = []
    for train_it in (plain, watched):
        torch.manual_seed(0)
        model = build_model(workload)
        with without_collection(), Lifetimes() as lifetimes:
            train_it(model)
        histories.append(lifetimes.history)
    assert len(histories[0]) > 100
    assert histories[0] == histories[1]


def test_a_run_gives_the_process_back(describe: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from accelerate.state import AcceleratorState, PartialState
    from transformers.utils import import_utils, logging

    verbosity, precision = logging.get_verbosity(), torch.backends.fp32_precision
    run_recorded(describe())
    assert (logging.get_verbosity(), torch.backends.fp32_precision) == (verbosity, precision)
    assert not AcceleratorState._shared_state
    assert not PartialState._shared_state
    assert import_utils.is_torch_cuda_available.cache_info().currsize == 0
    assert capsys.readouterr().out == ""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


@pytest.mark.parametrize("loop", LOOPS)
def test_use_cache_is_off_by_default_only_in_the_trainer(describe: Any, loop: str) -> None:
    used = {}
    for setting in (None, False, True):
        workload = describe("GPT2LMHeadModel", loop=loop, train={} if setting is None else {"use_cache": setting})
        used[setting] = run_recorded(workload, steps=1).model.config.use_cache
    assert used == {None: loop == "pytorch", False: False, True: True}


class Drawing(torch.nn.Module):
    """Remembers a number that it draws, as a model does that leaves out layers at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.drawn: list[float] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.drawn.append(torch.rand([]).item())
        return self.layer(x).sum()


def test_what_was_drawn_for_the_weights_does_not_count() -> None:
    """A prediction draws none, so the loop begins with its seed."""
    models = Drawing(), Drawing()
    workload = Workload.from_mapping({"model": {"class": "Drawing"}, "loop": "pytorch", "train": {"seed": 5}})
    for model in models:
        run(
            workload,
            model,
            device="cpu",
            steps=2,
            observer=Observer(),
            make_batch=lambda size: {"x": torch.ones(size, 4)},
        )
    assert models[0].drawn == models[1].drawn
