"""The Trainer with the callback: its logs, the result, and a machine without a GPU."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_allocator import FakeAllocator
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import CallbackHandler

import trainatomy
from trainatomy.integrations import CheckpointEvery, watch
from trainatomy.integrations.live_measurement import unprepared

SAMPLES = 32


class Data(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Dataset of sentences of eight tokens."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.full((8,), index), "labels": torch.tensor(index % 2)}


class Reporter(TrainerCallback):
    """Callback that runs first, like TensorBoard's with ``report_to``."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs or {}))


def model(size: int = 16, positions: int = 512) -> BertForSequenceClassification:
    torch.manual_seed(0)
    sizes = {"hidden_size": size, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": size}
    return BertForSequenceClassification(BertConfig(vocab_size=64, max_position_embeddings=positions, **sizes))


def trainer(folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Trainer:
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=4,
        num_train_epochs=1,
        logging_steps=2,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **settings,
    )
    return Trainer(model=model(), args=arguments, train_dataset=Data(), callbacks=list(callbacks))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeAllocator]:
    allocator = FakeAllocator()
    allocator.install(monkeypatch)
    with allocator:
        yield allocator


def test_components_reach_whoever_reports(gpu: FakeAllocator, tmp_path: Path) -> None:
    reporter, callback = Reporter(), trainatomy.AnatomyCallback(print=False)
    run = trainer(tmp_path, reporter)
    run.add_callback(callback)
    run.train()
    logged = [logs for logs in reporter.logs if "loss" in logs]
    assert len(logged) == 4
    for logs in logged:
        assert logs["memory/weights_gib"] > 0 and logs["memory/device_gib"] > 0
        assert all(isinstance(value, float) for name, value in logs.items() if name.startswith("memory/"))
    assert "memory/activations_gib" in run.state.log_history[0]
    assert not any("memory/" in name for logs in reporter.logs if "loss" not in logs for name in logs)


def test_the_measurement_is_there_after_the_training(
    gpu: FakeAllocator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    original = CallbackHandler.on_log
    callback = trainatomy.AnatomyCallback()
    run = trainer(tmp_path, callback, gradient_accumulation_steps=2)
    run.train()
    found = callback.measurement
    assert found is not None and found.memory is not None
    assert (found.status, found.steps, found.name) == ("completed", 4, "BertForSequenceClassification")
    assert found.samples_per_second == 4 * 2 / 0.5 and found.tokens_per_second == 4 * 2 * 8 / 0.5
    assert found.workload["train"] == {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "dataloader_pin_memory": False,
        "num_train_epochs": 1,
    }
    lines = {line.name: line.bytes for line in found.memory.lines}
    assert lines["parameters"] > 0 and lines["gradients"] > 0
    assert CallbackHandler.on_log is original and not gpu.recording
    printed = capsys.readouterr().out
    assert "completed: BertForSequenceClassification on NVIDIA H200, 4 optimizer steps" in printed
    assert "optimizer states" in printed and "before the watch" in printed


def test_a_failed_training_is_analyzed_when_the_next_begins(gpu: FakeAllocator, tmp_path: Path) -> None:
    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not self_stopped:
                self_stopped.append(True)
                raise KeyError("stop")

    self_stopped: list[bool] = []
    callback = trainatomy.AnatomyCallback(print=False)
    run = trainer(tmp_path, Stop(), callback)
    with pytest.raises(KeyError):
        run.train()
    run.train()
    assert callback.measurement is not None and callback.measurement.steps == 8
    assert not gpu.recording


def test_out_of_memory_in_the_trainer_is_analyzed(gpu: FakeAllocator, tmp_path: Path) -> None:
    class Shrink(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                gpu.limit = gpu.held + 20_000

    original = CallbackHandler.on_log
    callback = trainatomy.AnatomyCallback(print=False)
    with pytest.raises(torch.OutOfMemoryError):
        trainer(tmp_path, Shrink(), callback).train()
    assert callback.measurement is None
    gpu.limit = None
    callback._close_unfinished()
    found = callback.measurement
    assert found is not None and (found.status, found.steps) == ("out of memory", 2)
    assert found.out_of_memory is not None and found.out_of_memory.requested_bytes > 0
    assert CallbackHandler.on_log is original and not gpu.recording


def test_a_watch_that_cannot_begin_changes_no_trainer(
    gpu: FakeAllocator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("mine")

    original = CallbackHandler.on_log
    monkeypatch.setattr("trainatomy.integrations.live_measurement.Stopwatch.tick", broken)
    with pytest.raises(ValueError, match="mine"):
        trainer(tmp_path, trainatomy.AnatomyCallback()).train()
    assert CallbackHandler.on_log is original and not gpu.recording


def test_an_internal_error_is_a_warning(gpu: FakeAllocator, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise ValueError("mine")

    monkeypatch.setattr("trainatomy.integrations.live_measurement.measured_breakdown", broken)
    with pytest.warns(RuntimeWarning, match="no anatomy: ValueError: mine"), trainatomy.watch(model()) as anatomy:
        pass
    assert anatomy.measurement is None and not gpu.recording


def test_records_and_prediction(gpu: FakeAllocator, tmp_path: Path) -> None:
    callback = trainatomy.AnatomyCallback(print=False, records=tmp_path / "records", predict=True)
    run = trainer(tmp_path, callback)
    run.train()
    assert callback.prediction is not None and callback.measurement is not None
    weights = callback.prediction.memory.components.weights
    assert weights == pytest.approx(callback.measurement.memory.components.weights, rel=0.01)  # type: ignore[union-attr]
    assert len(list((tmp_path / "records").iterdir())) == 1
    assert run.evaluate(Data())["eval_loss"] > 0  # accelerate's state outlived the prediction


def test_the_predicted_memory_reaches_whoever_reports(gpu: FakeAllocator, tmp_path: Path) -> None:
    reporter, callback = Reporter(), trainatomy.AnatomyCallback(print=False, predict=True)
    run = trainer(tmp_path, reporter)
    run.add_callback(callback)
    run.train()
    last = reporter.logs[-1]
    assert "train_runtime" in last and last["predicted_step_seconds"] > 0
    predicted = {name: value for name, value in last.items() if name.startswith("memory_predicted/")}
    assert callback.prediction is not None and callback.measurement is not None
    assert predicted["memory_predicted/device_gib"] == round(callback.prediction.memory.device_bytes / 2**30, 4)
    assert {name.removeprefix("memory_predicted/") for name in predicted} >= {"weights_gib", "activations_gib"}
    assert run.state.log_history[-1]["memory_predicted/device_gib"] == predicted["memory_predicted/device_gib"]
    assert not any("memory_predicted" in name for logs in reporter.logs[:-1] for name in logs)


@pytest.mark.parametrize("first", [True, False])
def test_thinned_checkpointing_is_measured_and_predicted(gpu: FakeAllocator, tmp_path: Path, first: bool) -> None:
    callback, thin = trainatomy.AnatomyCallback(print=False, predict=True), CheckpointEvery(2)
    run = trainer(tmp_path, *((thin, callback) if first else (callback, thin)), gradient_checkpointing=True)
    run.train()
    assert callback.measurement is not None and callback.prediction is not None
    found = callback.measurement.workload["train"]
    assert isinstance(found, dict) and found["gradient_checkpointing_every"] == 2
    batch = {"input_ids": torch.zeros(4, 8, dtype=torch.long), "labels": torch.zeros(4, dtype=torch.long)}
    settings = {"gradient_checkpointing": True, "gradient_checkpointing_every": 2}
    plain = trainatomy.predict(model(), batch=batch, gpu="h200", loop="trainer", **settings)
    assert callback.prediction.memory.components.activations == plain.memory.components.activations > 0


def test_layers_that_no_setting_describes_are_not_predicted(gpu: FakeAllocator, tmp_path: Path) -> None:
    class Last(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            model.bert.encoder.layer[0].gradient_checkpointing = False

    callback = trainatomy.AnatomyCallback(print=False, predict=True)
    with pytest.warns(RuntimeWarning, match="no prediction: WorkloadError: the layers that recompute"):
        trainer(tmp_path, callback, Last(), gradient_checkpointing=True).train()
    assert callback.measurement is not None and callback.prediction is None


def test_a_prepared_model_is_predicted_with_its_precision(gpu: FakeAllocator, tmp_path: Path) -> None:
    callback = trainatomy.AnatomyCallback(print=False, predict=True)
    run = trainer(tmp_path, callback, bf16=True, max_steps=2, optim="sgd")
    run.model = run.model_wrapped = model(64, positions=16)
    run.train()
    assert callback.prediction is not None
    batch = {"input_ids": torch.zeros(4, 8, dtype=torch.long), "labels": torch.zeros(4, dtype=torch.long)}
    settings = {"per_device_train_batch_size": 4, "bf16": True, "optim": "sgd"}
    plain = trainatomy.predict(model(64, positions=16), batch=batch, gpu="h200", loop="trainer", **settings)
    found, expected = callback.prediction.memory, plain.memory
    for name in ("weights", "gradients", "optimizer_states", "activations", "temporary", "context"):
        assert found.components.as_dict()[name] == expected.components.as_dict()[name], name
    assert "16-bit copies kept by autocast" in {line.name for line in found.lines}
    assert vars(run.model)["_is_accelerate_prepared"], "the training's own model stays as it is"


def test_a_forward_that_was_replaced_before_it_was_prepared_is_kept() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # a test before may have made another
    plain, replaced = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    replaced.forward = types.MethodType(lambda self, x: 2 * torch.nn.Linear.forward(self, x), replaced)
    expected = [plain(torch.ones(2)), replaced(torch.ones(2))]
    accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare(plain, replaced)
    for model, result in zip((plain, replaced), expected, strict=True):
        bare = unprepared(copy.deepcopy(model))
        assert torch.equal(bare(torch.ones(2)), result)
        assert "_is_accelerate_prepared" not in vars(bare) and "_is_accelerate_prepared" in vars(model)


def test_without_a_gpu_the_training_runs_unchanged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_has_warned", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    callback = trainatomy.AnatomyCallback()
    with pytest.warns(RuntimeWarning, match="finds no GPU"):
        run = trainer(tmp_path, callback)
        run.train()
    assert callback.measurement is None
    plain = trainer(tmp_path)
    plain.train()
    for one, other in zip(run.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(one, other)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        trainatomy.print_gpu_utilization()
        with trainatomy.watch(model()) as anatomy:
            pass
        anatomy.print()
    assert anatomy.result() is None


def test_summaries_of_everything(gpu: FakeAllocator, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = trainer(tmp_path).train()
    capsys.readouterr()
    trainatomy.print_summary(output)
    printed = capsys.readouterr().out
    assert printed.startswith(f"Time: {output.metrics['train_runtime']:.2f}\nSamples/second: ")
    assert "GPU memory occupied: 1179 MiB (NVIDIA H200)" in printed
    for part in ("driver", "context and kernels", "500 MiB", "reserved by PyTorch"):
        assert part in printed
    assert "other processes" not in printed and "listed" not in printed
    with pytest.raises(trainatomy.TrainatomyError, match="cannot read a list"):
        trainatomy.print_summary([])
