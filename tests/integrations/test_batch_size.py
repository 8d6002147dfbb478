"""Helpers that take the place of ``auto_find_batch_size`` and ``find_executable_batch_size``."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import PartialState
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import trainatomy
from trainatomy import api
from trainatomy.errors import DoesNotFit, WorkloadError
from trainatomy.integrations import batch_size, fit_training_arguments, predicted_batch_size
from trainatomy.integrations.training_arguments import can_hold, check_launch, train_settings, with_candidate
from trainatomy.requests.fitting import FitRequest
from trainatomy.results.fit import Candidate, Change
from trainatomy.search.space import space_of
from trainatomy.simulator.live import applies_to
from trainatomy.training.checkpointing import checkpointed_every
from trainatomy.workload import Workload

LENGTH = 32
KEPT = ("gradient_checkpointing", "optimizer_implementation", "torch_empty_cache_steps")
"""Everything that a search for arguments could vary beside the batch size."""


def tiny(layers: int = 3) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": layers, "n_head": 2, "vocab_size": 100, "n_positions": 64}
    config = GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config)


@pytest.fixture
def arguments(tmp_path: Path) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(tmp_path), per_device_train_batch_size=32, gradient_accumulation_steps=2, max_steps=2,
        auto_find_batch_size=True, learning_rate=1e-2, report_to="none", save_strategy="no",
    )  # fmt: skip


def headroom_for(model: nn.Module, batch: int) -> float:
    """Return the headroom that leaves just enough of a T4 for a batch size."""
    needed = api.predict(
        model, gpu="t4", loop="trainer", data={"sequence_length": LENGTH}, per_device_train_batch_size=batch,
        gradient_accumulation_steps=64 // batch, timed=False,
    )  # fmt: skip
    return 1 - (needed.memory.device_bytes + 1) / needed.gpu.memory_bytes


def trained(model: nn.Module, args: TrainingArguments) -> dict[str, torch.Tensor]:
    """Return the weights of a model after it was trained on the CPU."""
    ids = torch.randint(100, (128, LENGTH), generator=torch.Generator().manual_seed(0))
    Trainer(model=model, args=args, train_dataset=[{"input_ids": row, "labels": row} for row in ids]).train()
    return model.state_dict()


def candidate(changes: tuple[Change, ...], **train: Any) -> Candidate:
    workload = {"model": {"class": "GPT2LMHeadModel"}, "train": train}
    return Candidate(changes, workload, prediction=SimpleNamespace(notes=()), fits=True)  # type: ignore[arg-type]


def checkpointing(name: str, *, on: bool, every: int) -> Change:
    settings = {"train.gradient_checkpointing": on, "train.gradient_checkpointing_every": every}
    return Change("gradient_checkpointing", name, settings)


def test_arguments_fit_and_train_what_they_trained_before(
    arguments: TrainingArguments, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny()
    headroom = headroom_for(model, 8)
    before, weights = dict(vars(arguments)), {name: value.clone() for name, value in model.state_dict().items()}
    state = dict(PartialState._shared_state)

    made = fit_training_arguments(arguments, model, sequence_length=LENGTH, gpu="t4", headroom=headroom, keep=KEPT[:2])

    assert (made.per_device_train_batch_size, made.gradient_accumulation_steps) == (8, 8)
    assert not made.auto_find_batch_size
    assert "batch 8 × 8 accumulation steps" in capsys.readouterr().out
    assert type(made) is type(arguments) and vars(arguments) == before
    assert PartialState._shared_state == state
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert model.training and model.config.use_cache and checkpointed_every(model) is None
    arguments.auto_find_batch_size = False
    expected = trained(tiny(), arguments)
    for name, value in trained(tiny(), made).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-4)
        assert not torch.equal(value, weights[name]) or not value.is_floating_point()


def test_where_the_model_is_does_not_matter(arguments: TrainingArguments) -> None:
    arguments.per_device_train_batch_size = 4
    batch = {name: torch.zeros((3, LENGTH), dtype=torch.int64) for name in ("input_ids", "labels")}
    for model in (tiny(), tiny().to("meta")):
        made = fit_training_arguments(arguments, model, batch=batch, gpu="t4", keep=KEPT)
        assert (made.per_device_train_batch_size, made.gradient_accumulation_steps) == (8, 1)


def test_a_name_stands_for_the_model_on_the_hub() -> None:
    model = batch_size._built("distilbert-base-uncased", trust_remote_code=False)
    assert isinstance(model, nn.Module)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}


def test_nothing_fits(arguments: TrainingArguments) -> None:
    arguments.per_device_train_batch_size = arguments.gradient_accumulation_steps = 1
    with pytest.raises(DoesNotFit, match=r"on T4: the smallest one needs \S+ MiB, .* more than .*\n.*\n- "):
        fit_training_arguments(arguments, tiny(1), sequence_length=LENGTH, gpu="t4", headroom=0.99, keep=KEPT)


@pytest.mark.parametrize("every", [1, 2])
def test_layers_that_recompute_are_those_that_were_chosen(arguments: TrainingArguments, every: int) -> None:
    arguments.gradient_checkpointing_kwargs = {"use_reentrant": False, "every_n_layers": 3}
    change = checkpointing("chosen", on=True, every=every)
    train = {"gradient_checkpointing": True, "gradient_checkpointing_every": every}
    made = with_candidate(arguments, candidate((change,), per_device_train_batch_size=64, **train))
    assert (made.per_device_train_batch_size, made.gradient_accumulation_steps) == (64, 1)
    settings, notes = train_settings(made)
    spec = Workload.from_mapping({"model": {"class": "GPT2LMHeadModel"}, "train": settings}).train
    assert (spec.gradient_checkpointing, spec.gradient_checkpointing_every, notes) == (True, every, ())
    model = tiny()
    trained(model, made)
    assert checkpointed_every(model) == every
    assert arguments.gradient_checkpointing_kwargs == {"use_reentrant": False, "every_n_layers": 3}


def test_checkpointing_is_switched_off_altogether(arguments: TrainingArguments) -> None:
    arguments.gradient_checkpointing = True
    arguments.gradient_checkpointing_kwargs = {"every_n_layers": 2}
    made = with_candidate(arguments, candidate((checkpointing("off", on=False, every=1),)))
    assert not made.gradient_checkpointing
    assert made.gradient_checkpointing_kwargs is None


def test_a_precision_reaches_the_trainer(arguments: TrainingArguments) -> None:
    arguments.fp16, arguments.mixed_precision = True, "fp16"
    change = Change("precision", "bf16", {"train.fp16": False, "train.bf16": True, "train.tf32": None}, "precision")
    made = with_candidate(arguments, candidate((change,), bf16=True))
    assert (made.fp16, made.bf16, made.mixed_precision) == (False, True, "bf16")


@pytest.mark.parametrize(
    ("settings", "held"),
    [
        ({"train.optim": "adamw_torch", "train.optim_args": None}, True),
        ({"train.optim": "adamw_torch", "train.optim_args": "foreach=False"}, False),
        ({"train.gradient_checkpointing": True, "train.gradient_checkpointing_every": 4}, True),
        ({"allocator": "expandable_segments:True"}, False),
        ({"data.sequence_length": 64}, False),
    ],
)
def test_only_what_arguments_can_hold_is_chosen(settings: dict[str, object], held: bool) -> None:
    assert can_hold(settings) is held


def test_an_older_transformers_cannot_skip_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    from trainatomy.integrations import training_arguments

    monkeypatch.setattr(training_arguments, "takes_every_and_offload", lambda: False)
    assert not can_hold({"train.gradient_checkpointing": True, "train.gradient_checkpointing_every": 4})
    assert can_hold({"train.gradient_checkpointing": True, "train.gradient_checkpointing_every": 1})


def test_what_is_not_simulated_is_named(arguments: TrainingArguments, tmp_path: Path) -> None:
    @dataclasses.dataclass
    class More(TrainingArguments):
        packing: bool = False
        max_grad_norm: float = 0.5

    made = More(
        output_dir=str(tmp_path), packing=True, eval_strategy="steps", eval_steps=1, optim="sgd",
        optim_args="momentum=0.9", auto_find_batch_size=True, logging_steps=7,
    )  # fmt: skip
    settings, notes = train_settings(made)
    assert settings["optim"] == "sgd" and settings["max_grad_norm"] == 0.5
    assert not {"optim_args", "packing", "auto_find_batch_size"} & set(settings)
    text = "\n".join(notes)
    assert "packing: More sets it" in text and "optim_args: the Trainer does not pass them to sgd" in text
    assert "train.eval_strategy: a Trainer with compute_metrics" in text and "auto_find" not in text
    settings, notes = train_settings(arguments)
    assert not notes
    assert settings["per_device_train_batch_size"] == 32 and settings["gradient_accumulation_steps"] == 2


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("torch_compile_backend", "aot_eager", "train.torch_compile_backend: .*not simulated"),
        ("full_determinism", True, "train.full_determinism: .*not simulated"),
        ("fsdp", "full_shard", "train.fsdp: shards over several GPUs"),
        ("mixed_precision", "fp8", "mixed_precision: fp8 is not simulated"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    arguments: TrainingArguments, name: str, value: object, reason: str
) -> None:
    setattr(arguments, name, value)
    with pytest.raises(WorkloadError, match=reason):
        train_settings(arguments)


def test_the_launcher_has_its_say(arguments: TrainingArguments, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments.mixed_precision = "bf16"  # `accelerate launch --mixed_precision bf16`
    assert train_settings(arguments)[0]["bf16"] is True
    check_launch(arguments)
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    with pytest.raises(WorkloadError, match=r"torch\.compile"):
        check_launch(arguments)
    monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND")
    arguments._n_gpu = 2
    with pytest.raises(WorkloadError, match="runs on 2 GPUs"):
        check_launch(arguments)


def test_contradictions_are_refused(arguments: TrainingArguments) -> None:
    with pytest.raises(WorkloadError, match="lora cannot be set by TrainingArguments"):
        fit_training_arguments(arguments, tiny(), gpu="t4", allow=("lora",))
    batch = {"input_ids": torch.zeros((1, 4), dtype=torch.int64)}
    with pytest.raises(WorkloadError, match="the batch has its length already"):
        fit_training_arguments(arguments, tiny(), gpu="t4", batch=batch, sequence_length=4)
    with pytest.raises(WorkloadError, match="predicted_batch_size finds it"):
        predicted_batch_size(model=tiny(), effective_batch_size=4, per_device_train_batch_size=2)


def test_a_function_is_called_once_with_sizes_that_keep_the_effective_batch() -> None:
    calls: list[tuple[Any, ...]] = []
    made: list[nn.Module] = []

    def make() -> nn.Module:
        made.append(tiny(1))
        return made[-1]

    @predicted_batch_size(
        model=make, effective_batch_size=6, sequence_length=LENGTH, optimizer=torch.optim.AdamW, gpu="t4", print=False
    )
    def train(batch: int, accumulation: int, epochs: int, *, name: str) -> str:
        """Train."""
        calls.append((batch, accumulation, epochs, name))
        return name

    assert train.__doc__ == "Train." and not made
    assert train(3, name="a") == "a" and train(epochs=4, name="b") == "b"
    assert [call[0] * call[1] for call in calls] == [6, 6]
    assert [call[2:] for call in calls] == [(3, "a"), (4, "b")]
    assert len(made) == 1
    with pytest.raises(TypeError, match="passes the batch size and the accumulation steps"):
        train(6, 1, 3, name="a")
    assert len(calls) == 2


def answered(monkeypatch: pytest.MonkeyPatch, *changes: Change, **train: Any) -> list[Any]:
    """Let searches be answered at once, and return the training and the request of each."""
    seen: list[Any] = []

    def search(training: Any, request: FitRequest) -> Any:
        seen.append((training, request))
        best = candidate(changes, per_device_train_batch_size=3, **train)
        best.prediction.notes, best.prediction.time = ("a note",), None  # type: ignore[misc]
        return SimpleNamespace(best=best, interrupted=len(seen) > 1)

    monkeypatch.setattr(api, "search_settings", search)
    return seen


def test_this_machine_is_asked_for_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = answered(monkeypatch)
    used = SimpleNamespace(other_bytes=trainatomy.find_gpu("t4").memory_bytes // 4, unlisted_bytes=None)
    monkeypatch.setattr(api, "this_gpu", lambda: "t4")
    monkeypatch.setattr(batch_size, "utilization", lambda: used)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    workload = Workload.from_mapping({"model": {"id": "gpt2"}})
    function = predicted_batch_size(
        lambda *sizes: sizes, model=workload, effective_batch_size=3, print=False, bf16=True, trust_remote_code=True
    )
    with pytest.warns(RuntimeWarning, match="a note") as warned:
        assert function() == (3, 1)
    assert {each.filename for each in warned} == {__file__}
    ((training, request),) = seen
    assert request.trust_remote_code
    assert training.gpu == "t4" and request.headroom == pytest.approx(0.3)
    assert training.settings["allocator"] == "max_split_size_mb:64" and training.settings["bf16"] is True
    assert request.can_apply({"train.per_device_train_batch_size": 3, "train.gradient_accumulation_steps": 1})
    assert not request.can_apply({"train.gradient_checkpointing": True})


def test_ctrl_c_ends_the_script(monkeypatch: pytest.MonkeyPatch, arguments: TrainingArguments) -> None:
    answered(monkeypatch).append(None)
    with pytest.raises(KeyboardInterrupt):
        fit_training_arguments(arguments, tiny(), gpu="t4")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_one_has_to_be_named(arguments: TrainingArguments) -> None:
    with pytest.raises(WorkloadError, match="gpu: this machine has none; name the GPU"):
        fit_training_arguments(arguments, tiny())


def test_a_search_varies_nothing_that_a_module_or_a_batch_keeps() -> None:
    workload = Workload.from_mapping({"loop": "pytorch", "model": {"class": "GPT2LMHeadModel"}, "gpu": "a100"})
    options = FitRequest(effective_batch_size=4, can_apply=applies_to(tiny(), {}))
    axes = {axis.name: {option.name for option in axis.options} for axis in space_of(workload, options).axes}
    assert not {"attention", "lora", "sequence_length"} & set(axes)
    assert {"bf16", "tf32"} <= axes["precision"] and "bf16_weights" not in axes["precision"]
    without_batch = FitRequest(effective_batch_size=4, can_apply=applies_to(tiny(), None))
    assert space_of(workload, without_batch).axis("sequence_length")
    with pytest.raises(WorkloadError, match="lora"):
        api.fit(tiny(), gpu="t4", allow=("lora",))
    for goal in ("model-size", "sequence-length", "data.image_size"):
        with pytest.raises(WorkloadError, match=f"maximize: {goal} needs the configuration"):
            api.fit(tiny(), gpu="t4", maximize=goal)
    with pytest.raises(WorkloadError, match=r"measure: .* cannot be handed a module"):
        api.fit(tiny(), gpu="t4", measure=1)


def test_a_change_of_training_is_announced(monkeypatch: pytest.MonkeyPatch, arguments: TrainingArguments) -> None:
    settings = {"train.optim": "sgd", "train.optim_args": None}
    answered(monkeypatch, Change("optimizer", "sgd", settings, "optimizer"), optim="sgd")
    with pytest.warns(RuntimeWarning, match="SGD: The update rule is different"):
        made = fit_training_arguments(arguments, tiny(), gpu="t4", allow=("optimizer",), print=False)
    assert (made.optim, made.optim_args, arguments.optim) == ("sgd", None, "adamw_torch_fused")


def test_no_warnings_of_its_own(arguments: TrainingArguments) -> None:
    arguments.per_device_train_batch_size = arguments.gradient_accumulation_steps = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        fit_training_arguments(arguments, tiny(1), sequence_length=LENGTH, gpu="t4", keep=KEPT, print=False)
    with pytest.warns(RuntimeWarning, match="every sample was taken to have 64 tokens"):
        fit_training_arguments(arguments, tiny(1), gpu="t4", keep=KEPT, print=False)
