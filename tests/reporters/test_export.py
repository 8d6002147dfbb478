"""Settings that are ready to paste: the Python runs, and YAML and options give the same workload again."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

from trainatomy.cli import main
from trainatomy.errors import WorkloadError
from trainatomy.reporters.export import command_line_flags, launch_command, training_arguments_code, workload_yaml
from trainatomy.results.fit import Candidate, Change, Fit
from trainatomy.workload.overrides import merge
from trainatomy.workload.schema import Workload


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the code in an empty folder, as some arguments create their output folder."""
    monkeypatch.chdir(tmp_path)


BERT = {"id": "google-bert/bert-base-uncased", "class": "BertForSequenceClassification"}
TRAIN = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
FOR_LOOP = {"optim": "adamw_torch", "optim_args": "foreach=False"}
ADAPTERS = {"r": 4, "lora_alpha": 8, "target_modules": ["query", "value"]}

WORKLOADS: dict[str, dict[str, Any]] = {
    "plain": {"name": "a run: 1", "model": BERT, "train": TRAIN},
    "defaults": {"model": {"id": "gpt2"}},
    "precision": {"model": {**BERT, "dtype": "bfloat16"}, "train": {**TRAIN, "bf16": True}},
    "for loop": {"model": BERT, "train": {**TRAIN, **FOR_LOOP}},
    "class": {"model": BERT, "train": {**TRAIN, "optim": "torch.optim.Adagrad", "optim_args": "lr_decay=0.1"}},
    "checkpointing": {
        "model": BERT,
        "train": {
            "gradient_checkpointing": True,
            "gradient_checkpointing_every": 2,
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
        },
    },
    "adapters": {
        "model": {**BERT, "attn_implementation": "eager", "config": {"num_labels": 3}, "lora": ADAPTERS},
        "data": {"sequence_length": 64},
        "train": {**TRAIN, "learning_rate": 2e-4, "torch_empty_cache_steps": 1},
        "allocator": "expandable_segments:True,max_split_size_mb:128",
    },
    "quantised": {
        "model": {**BERT, "quantization": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "lora": ADAPTERS},
        "train": TRAIN,
    },
    "default adapters": {"model": {**BERT, "lora": {}}, "gpu": {"base": "t4", "memory_bytes": 2**33}},
    "from scratch": {"model": {"class": "BertForMaskedLM", "config": {"num_hidden_layers": 2}}},
    "pytorch": {"model": BERT, "loop": "pytorch", "train": {**TRAIN, **FOR_LOOP, "max_grad_norm": 0.0}},
    "pytorch, all": {
        "model": BERT,
        "loop": "pytorch",
        "zero_grad_set_to_none": False,
        "train": {"bf16": True, "gradient_checkpointing": True, "gradient_checkpointing_every": 2, "optim": "sgd"},
    },
    "pytorch, offloading": {
        "model": BERT,
        "loop": "pytorch",
        "activation_offloading": "pageable",
        "train": {"bf16": True, "optim": "sgd"},
    },
}

ACCUMULATED = {**TRAIN, "per_device_train_batch_size": 2}
SPREAD: dict[str, dict[str, Any]] = {
    "ddp": {"gpus": 8, "gradient_as_bucket_view": True},
    "ddp, synchronized": {"gpus": 8, "sync_each_batch": True, "bucket_cap_mb": 50},
    "zero1": {"gpus": 8, "strategy": "zero1"},
    "fsdp2": {"gpus": 8, "nodes": 2, "strategy": "fsdp2", "reshard_after_forward": False},
    "fsdp2, offloading": {"gpus": 8, "strategy": "fsdp2", "offload_policy": "cpu"},
    "fsdp2, policy": {"gpus": 8, "strategy": "fsdp2", "mp_policy": {"param_dtype": "bfloat16"}},
}
for _name, _parallel in SPREAD.items():
    WORKLOADS[_name] = {"model": BERT, "loop": "pytorch", "train": ACCUMULATED, "parallel": _parallel}
WORKLOADS["zero1, one batch"] = {**WORKLOADS["zero1"], "train": {"optim": "sgd", "optim_args": "momentum=0.9"}}


@pytest.fixture(params=WORKLOADS.values(), ids=list(WORKLOADS))
def exported(request: pytest.FixtureRequest, fit: Fit) -> Candidate:
    """Return a candidate with one of ``WORKLOADS``."""
    return with_workload(fit, request.param)


def with_workload(fit: Fit, mapping: dict[str, Any], *changes: Change) -> Candidate:
    assert fit.best is not None
    return replace(fit.best, changes=changes, workload=Workload.from_mapping(mapping).to_mapping())


def test_yaml_gives_the_same_workload_and_says_its_batch(exported: Candidate) -> None:
    text = workload_yaml(exported)
    assert Workload.from_mapping(yaml.safe_load(text)) == Workload.from_mapping(exported.workload)
    train = yaml.safe_load(text)["train"]
    assert train["per_device_train_batch_size"] == exported.per_device_train_batch_size
    assert train["gradient_accumulation_steps"] == exported.gradient_accumulation_steps


def parsed(text: str, monkeypatch: pytest.MonkeyPatch) -> Workload:
    """Return the workload that ``trainatomy predict`` reads from options."""
    from trainatomy.cli import predict as command

    seen: list[Workload] = []

    def stop(file: str | None, flags: dict[str, Any]) -> Workload:
        seen.append(merge(None, flags))
        raise WorkloadError("the rest is not under test")

    monkeypatch.setattr(command, "one_workload", stop)
    arguments = shlex.split(text.replace("\\\n", " "), comments=True)
    main(["predict", *arguments])
    return seen[0]


def test_options_give_the_same_workload(exported: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    text = command_line_flags(exported)
    assert "only a workload file" not in text
    assert parsed(text, monkeypatch) == Workload.from_mapping(exported.workload)
    assert max(map(len, text.splitlines())) <= 78


def test_what_no_option_can_set_is_said(fit: Fit) -> None:
    candidate = with_workload(fit, {"model": {**BERT, "lora": {"r": 4, "layers_to_transform": [0, 1]}}})
    assert command_line_flags(candidate).endswith("# only a workload file can set: model.lora.layers_to_transform")
    odd = with_workload(fit, {"model": {**BERT, "lora": {"init_lora_weights": "false"}}, "train": TRAIN})
    assert "--lora-r" not in command_line_flags(odd)


def test_changed_settings_are_written_even_if_they_are_defaults(fit: Fit) -> None:
    change = Change("precision", "fp32", {"train.bf16": False, "train.gradient_checkpointing": False})
    candidate = with_workload(fit, {"model": BERT}, change)
    assert "--no-bf16" in command_line_flags(candidate)
    assert "bf16=False" in training_arguments_code(candidate, "run")


def run(code: str) -> dict[str, Any]:
    """Execute code that makes ``TrainingArguments``, on the CPU."""
    names: dict[str, Any] = {}
    code = code.replace("TrainingArguments(\n", "TrainingArguments(\n    use_cpu=True,\n")
    exec(compile(code, "settings", "exec"), names)
    return names


def test_training_arguments_have_the_values(exported: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload.from_mapping(exported.workload)
    code = training_arguments_code(exported, "a run: 1")
    compile(code, "settings", "exec")
    if workload.loop == "pytorch":
        return
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    arguments = run(code)["args"]
    assert isinstance(arguments, TrainingArguments)
    assert arguments.output_dir == "a-run-1"
    assert os.environ.get("PYTORCH_ALLOC_CONF", "") == workload.allocator
    left_out = {"gradient_checkpointing_every", "optim", "optim_args"}
    for name in workload.to_mapping().get("train", {}).keys() - left_out:
        assert getattr(arguments, name) == getattr(workload.train, name), name
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps", "gradient_checkpointing"):
        assert getattr(arguments, name) == getattr(workload.train, name), name
    if "." not in workload.train.optim:
        assert arguments.optim == workload.train.optim


def tiny() -> BertForSequenceClassification:
    config = BertConfig(hidden_size=8, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16, vocab_size=32)
    return BertForSequenceClassification(config)


@pytest.fixture
def dataset() -> list[dict[str, torch.Tensor]]:
    """Return 16 samples of 4 tokens."""
    return [{"input_ids": torch.arange(4) + index, "labels": torch.tensor(index % 2)} for index in range(16)]


def uncommented(code: str, dataset: object) -> dict[str, Any]:
    """Execute code with the lines of code in its comments, in a script that has a model, a tokenizer and data."""
    lines = [line.removeprefix("#   ") for line in code.splitlines()]
    names = {"model": tiny(), "dataset": dataset, "texts": ["a b"], "tokenizer": lambda *texts, **options: options}
    text = "\n".join(lines).replace("TrainingArguments(\n", "TrainingArguments(\n    use_cpu=True,\n")
    exec(compile(text, "settings", "exec"), names)
    return names


def test_code_in_comments_makes_the_trainer(
    fit: Fit, dataset: list[dict[str, torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def names_of(case: str) -> dict[str, Any]:
        return uncommented(training_arguments_code(with_workload(fit, WORKLOADS[case]), "run"), dataset)

    loop = names_of("for loop")["trainer"].create_optimizer()
    assert (type(loop), loop.defaults["foreach"], loop.defaults["lr"]) == (torch.optim.AdamW, False, 5e-5)
    adagrad = names_of("class")["trainer"].optimizer
    assert (type(adagrad), adagrad.defaults["lr_decay"]) == (torch.optim.Adagrad, 0.1)
    callbacks = names_of("checkpointing")["trainer"].callback_handler.callbacks
    assert "CheckpointEvery" in {type(each).__name__ for each in callbacks}
    assert names_of("from scratch")["configuration"] == {"num_hidden_layers": 2}
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    adapted = names_of("adapters")
    assert adapted["loading"] == {"attn_implementation": "eager", "num_labels": 3}
    assert adapted["tokens"] == {"truncation": True, "max_length": 64}
    assert adapted["model"].peft_config["default"].target_modules == {"query", "value"}
    quantised = names_of("quantised")
    assert quantised["quantised"].to_diff_dict().items() >= {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}.items()
    assert not any(p.requires_grad for name, p in quantised["model"].named_parameters() if "lora" not in name)


@pytest.mark.parametrize("case", ["pytorch", "pytorch, all", "pytorch, offloading"])
def test_the_plain_loop_trains(case: str, fit: Fit, dataset: list[dict[str, torch.Tensor]]) -> None:
    names: dict[str, Any] = {}
    code = training_arguments_code(with_workload(fit, WORKLOADS[case]), "run")
    exec(compile(code, "settings", "exec"), names)
    model = tiny()
    before = model.classifier.weight.detach().clone()
    names["train"](model, dataset, device="cpu")
    assert not torch.equal(before, model.classifier.weight)
    assert model.is_gradient_checkpointing == (case == "pytorch, all")


def test_what_the_plain_loop_keeps_in_host_memory_is_in_the_code(fit: Fit) -> None:
    kwargs = {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False, "offload": True},
    }
    workload = {"model": BERT, "loop": "pytorch", "activation_offloading": "pinned", "train": {"bf16": True, **kwargs}}
    code = training_arguments_code(with_workload(fit, workload), "run")
    offload = 'gradient_checkpointing_kwargs={"use_reentrant": False}, offload=True'
    assert f"model.gradient_checkpointing_enable({offload})" in code
    autocast = "torch.autocast(device, dtype=torch.bfloat16)"
    assert f"with {autocast}, torch.autograd.graph.save_on_cpu(pin_memory=True):" in code


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let ``init_process_group`` make a group of this process alone."""
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("case", [*(case for case in SPREAD if "offloading" not in case), "zero1, one batch"])
def test_the_loop_on_several_gpus_trains(
    case: str, fit: Fit, dataset: list[dict[str, torch.Tensor]], one_process: None
) -> None:
    names: dict[str, Any] = {}
    code = training_arguments_code(with_workload(fit, WORKLOADS[case]), "run")
    exec(compile(code, "settings", "exec"), names)
    model = tiny()
    before = model.classifier.weight.detach().clone()
    names["train"](model, dataset, device="cpu")
    after = model.classifier.weight.detach()
    assert not torch.equal(before, after.full_tensor() if case.startswith("fsdp2") else after)
    assert ("no_sync()" in code) == (case in ("ddp", "zero1")), "gradients are reduced after the last micro-batch"
    assert ("set_requires_gradient_sync" in code) == case.startswith("fsdp2")


def test_the_trainers_plan_is_in_its_arguments(fit: Fit) -> None:
    config = {"version": 2, "reshard_after_forward": False}
    workload = {"model": BERT, "train": {"fsdp": True, "fsdp_config": config}, "parallel": {"gpus": 8}}
    candidate = with_workload(fit, workload)
    code = training_arguments_code(candidate, "run")
    assert "    fsdp=True,\n" in code
    assert '    fsdp_config={"version": 2, "reshard_after_forward": False},\n' in code
    assert "--fsdp true --fsdp-config version=2 --fsdp-config reshard_after_forward=false" in _unfolded(candidate)
    assert "#" not in _unfolded(candidate), "options set everything"


def test_replicas_of_the_trainers_shards_are_said(fit: Fit) -> None:
    workload = {"model": BERT, "train": {"fsdp": True}, "parallel": {"gpus": 8, "nodes": 2, "dp_replicate_size": 2}}
    code = training_arguments_code(with_workload(fit, workload), "run")
    assert "#   replicas = ParallelismConfig(dp_replicate_size=2, dp_shard_size=8)\n" in code


def _unfolded(candidate: Candidate) -> str:
    return command_line_flags(candidate).replace(" \\\n", " ")


def test_the_command_starts_a_process_for_each_gpu(fit: Fit) -> None:
    one, two = (with_workload(fit, WORKLOADS[case]) for case in ("ddp", "fsdp2"))
    assert launch_command(one) == "torchrun --nproc-per-node 8 train.py"
    assert launch_command(two).startswith("torchrun --nnodes 2 --nproc-per-node 8 ")


def test_gradients_on_the_host_get_a_backend_of_the_cpu(fit: Fit) -> None:
    starts = [
        training_arguments_code(with_workload(fit, WORKLOADS[case]), "run") for case in ("fsdp2", "fsdp2, offloading")
    ]
    assert ["cpu:gloo,cuda:nccl" in start for start in starts] == [False, True]
