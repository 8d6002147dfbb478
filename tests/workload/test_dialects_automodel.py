"""Recipes of NeMo Automodel as workloads, and answers in their nested keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trainatomy.errors import NotSimulated, WorkloadError
from trainatomy.workload import Workload
from trainatomy.workload.dialects.answer import Answer, answer_in, rewritten, settings_in
from trainatomy.workload.dialects.translation import flattened
from trainatomy.workload.reading import read

RECIPE = """\
recipe: TrainFinetuneRecipeForNextTokenPrediction

step_scheduler:  # how often
  global_batch_size: 64
  local_batch_size: 8   # of each GPU
  val_every_steps: 10

model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: {model}

# how it is spread
distributed:
  strategy: fsdp2
  dp_size: none

  # nothing more

loss_fn:
  _target_: nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy
dataset: {{_target_: some.dataset, seq_length: 1000}}
dataloader:
  collate_fn:
    _target_: nemo_automodel.components.datasets.utils.default_collater
    pad_seq_len_divisible: 64
optimizer:
  _target_: torch.optim.Adam
  betas: [0.9, 0.95]
  eps: 1e-8
  lr: 1.0e-5
  weight_decay: 0
ci:
  nodes: 1
"""
LLAMA, QWEN, MISTRAL = "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-0.6B", "mistralai/Mistral-7B-v0.1"


def text_of(model: str = LLAMA, **changes: Any) -> str:
    """Return the recipe with some keys changed, by their dotted paths with ``__`` for a dot."""
    if not changes:
        return RECIPE.format(model=model)
    content = yaml.safe_load(RECIPE.format(model=model))
    for path, value in changes.items():
        *sections, name = path.split("__")
        inside = content
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[name] = value
    return yaml.safe_dump(content, sort_keys=False)


def workload_of(folder: Path, model: str = LLAMA, flags: dict[str, Any] | None = None, **changes: Any) -> Workload:
    file = folder / "recipe.yaml"
    file.write_text(text_of(model, **changes))
    return read(file, flags)


def test_a_recipe_is_a_plain_loop(tmp_path: Path) -> None:
    found = workload_of(tmp_path, validation_dataset___target_="some.dataset")
    assert found.loop == "pytorch"
    assert found.model.id == LLAMA and found.model.attn_implementation == "sdpa"
    train = found.train
    assert (train.per_device_train_batch_size, train.gradient_accumulation_steps) == (8, 8)
    assert (train.optim, train.max_grad_norm, train.adam_beta2) == ("torch.optim.Adam", 1.0, 0.95)
    assert found.data.sequence_length == 1024 and found.data.attention_mask
    assert found.parallel.gpus == 1 and found.parallel.mp_policy is None
    assert found.origin is not None
    said = "; ".join(found.origin.assumed)
    assert "one GPU (distributed.dp_size)" in said and "flash-attn" in said and "validation" in said


@pytest.mark.parametrize(
    ("padding", "target", "row", "pads"),
    [
        (None, "datasets.llm.squad.make_squad_dataset", 999, False),
        ("max_length", "datasets.llm.squad.make_squad_dataset", 1000, True),
        (None, "some.dataset", 1000, False),
    ],
)
def test_inputs_leave_out_the_last_token(
    tmp_path: Path, padding: str | None, target: str, row: int, pads: bool
) -> None:
    changes = {"dataset___target_": target, "dataloader__collate_fn": "default_collater"}
    data = workload_of(tmp_path, **changes, dataset__padding=padding).data
    assert (data.sequence_length, bool(data.padding)) == (row, pads)


@pytest.mark.parametrize("count", ["flag", "command", "file"])
def test_accumulation_follows_from_the_number_of_gpus(tmp_path: Path, count: str) -> None:
    if count == "flag":
        found = workload_of(tmp_path, flags={"gpus": 4})
    elif count == "file":
        found = workload_of(tmp_path, distributed__dp_size=4)
    else:
        workload_of(tmp_path)
        found = read(f"automodel finetune llm -c {tmp_path / 'recipe.yaml'} --nproc-per-node 4")
    parallel = found.parallel
    assert (parallel.gpus, parallel.strategy, parallel.reshard_after_forward) == (4, "fsdp2", "all_but_last")
    assert parallel.mp_policy is not None
    assert (parallel.mp_policy.param_dtype, parallel.mp_policy.reduce_dtype) == ("bfloat16", "float32")
    assert found.train.gradient_accumulation_steps == 2


def test_commands_change_nested_keys(tmp_path: Path) -> None:
    workload_of(tmp_path)
    script = "examples/llm_finetune/finetune.py"
    command = f"torchrun --nproc-per-node=2 {script} -c {tmp_path / 'recipe.yaml'} --step_scheduler.local_batch_size 4"
    found = read(command)
    assert (found.parallel.gpus, found.train.per_device_train_batch_size) == (2, 4)
    assert found.train.gradient_accumulation_steps == 8
    with pytest.raises(WorkloadError, match=r"--step_scheduler\.local_batch_size: must be a whole number"):
        read(f"automodel {tmp_path / 'recipe.yaml'} --step_scheduler.local_batch_size=many")


@pytest.mark.parametrize(
    ("model", "more", "liger"),
    [
        (QWEN, {}, None),
        (LLAMA, {}, "rms_norm"),
        (MISTRAL, {}, "layers"),
        (MISTRAL, {"model__use_liger_kernel": False}, None),
        (LLAMA, {"model__force_hf": True}, "layers"),
    ],
)
def test_layers_are_those_of_the_implementation(
    tmp_path: Path, model: str, more: dict[str, Any], liger: str | None
) -> None:
    train = workload_of(tmp_path, model, **more).train
    assert train.use_liger_kernel == (liger is not None)
    layers = dict(train.liger_kernel_config or {})
    assert layers.get("rms_norm") is (True if liger == "rms_norm" else None)
    assert layers.get("fused_linear_cross_entropy") is (False if liger else None)


def test_adapters_are_on_the_layers_that_patterns_name(tmp_path: Path) -> None:
    model = workload_of(tmp_path, peft__dim=16, peft__target_modules="*_proj", peft__use_triton=True).model
    assert model.trainable_dtype == "bfloat16"  # that of the layers, where peft's would be float32
    lora = model.lora
    assert lora is not None and (lora.r, lora.lora_alpha) == (16, 32)
    assert isinstance(lora.target_modules, str) and ".*_proj" in lora.target_modules
    every = workload_of(tmp_path, peft__exclude_modules=["lm_head", "*.out_proj"]).model.lora
    assert every is not None and every.target_modules == "all-linear" and every.exclude_modules


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recipe": "FinetuneRecipeForVLM"}, "recipe: FinetuneRecipeForVLM: not simulated"),
        ({"model__pretrained_model_name_or_path": "openai/gpt-oss-20b"}, "own implementation of GptOssForCausalLM"),
        ({"model__pretrained_model_name_or_path": "some/thing"}, "its architecture is not known here"),
        ({"model__backend": {"linear": "te"}}, "model.backend.linear: te: not simulated"),
        ({"model__attn_implementation": "te"}, "attn_implementation: te: not simulated"),
        ({"distributed__tp_size": 2}, "tp_size: not simulated: tensor parallelism"),
        ({"distributed__pp_size": 2}, "pp_size: not simulated: Automodel's pipelines"),
        ({"distributed__ep_size": 8}, "ep_size: not simulated: experts"),
        ({"distributed__strategy": "megatron_fsdp"}, "strategy: megatron_fsdp: not simulated"),
        ({"distributed__activation_checkpointing": True}, "one by one"),
        ({"fp8__enabled": True}, "fp8.enabled: not simulated: training in FP8"),
        ({"compile__enabled": True}, "compile.enabled: not simulated"),
        ({"loss_fn___target_": "a.FusedLinearCrossEntropy"}, "cut cross-entropy"),
        ({"loss_fn__fp32_upcast": False}, "fp32_upcast: false: not simulated"),
        ({"optimizer___target_": "te.FusedAdam"}, "te.FusedAdam: not simulated"),
        ({"packed_sequence__packed_sequence_size": 4096}, "packs of samples"),
        ({"peft__match_all_linear": True}, "output layer"),
        ({"peft__dropout": 0.1}, "dropout after the adapters"),
        ({"peft__target_modules": "*_proj", "peft__ranks": 3}, "peft.ranks: is no key of PeftConfig"),
        ({"step_scheduler__global_batch_size": 60}, "60 is no multiple of 8 samples"),
        ({"step_scheduler__local_batch_size": "many"}, "must be a whole number above 0"),
        ({"distributed__shards": 2}, "settings of parallelism that are not known"),
        ({"clip_grad_norm": 2}, "clip_grad_norm: must be a mapping of keys to values, found 2"),
        ({"peft": [1]}, "peft: must be a mapping"),
        ({"peft__exclude_modules": "("}, "peft.exclude_modules: is no pattern"),
        ({"dataloader__collate_fn": "a.packed_sequence_thd_collater"}, "packed_sequence_thd_collater: not simulated"),
        ({"model__backend": {"attn": "magi"}}, "model.backend.attn: magi: not simulated"),
        ({"optimizer__betas": 0.9}, "betas: must be two numbers"),
        ({"model__pretrained_model_name_or_path": "${MODEL}"}, "is a template"),
        ({"optimiser": {"lr": 1}}, "is no key of NeMo Automodel"),
        ({"train": {"bf16": True}}, "it is one or the other"),
    ],
)
def test_what_differs_is_refused_by_name_and_line(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises((NotSimulated, WorkloadError)) as raised:
        workload_of(tmp_path, **changes)
    assert message in str(raised.value)
    assert "recipe.yaml:" in str(raised.value)


def test_a_collator_is_a_name_or_a_section(tmp_path: Path) -> None:
    assert workload_of(tmp_path, dataloader__collate_fn="some.default_collater").data.sequence_length == 1000


def test_checkpointing_of_transformers_layers_is_read(tmp_path: Path) -> None:
    train = workload_of(tmp_path, MISTRAL, distributed__activation_checkpointing="full").train
    assert train.gradient_checkpointing


def changed(folder: Path, **keys: Any) -> tuple[str, str]:
    """Return the text of the recipe and the same with keys changed."""
    origin = workload_of(folder).origin
    assert origin is not None
    answer = Answer({path.replace("__", "."): value for path, value in keys.items()})
    return origin.text, rewritten(origin, answer)


@pytest.mark.parametrize(
    ("keys", "before", "after"),
    [
        ({"step_scheduler__local_batch_size": 2}, "local_batch_size: 8 ", "local_batch_size: 2 "),
        ({"dataset__seq_length": 256}, "seq_length: 1000}", "seq_length: 256}"),
        ({"loss_fn__fp32_upcast": True}, "MaskedCrossEntropy\n", "MaskedCrossEntropy\n  fp32_upcast: true\n"),
        ({"distributed__cp_size": 2}, "dp_size: none\n", "dp_size: none\n  cp_size: 2\n"),
        ({"dataloader__collate_fn__more": 1}, "divisible: 64\n", "divisible: 64\n    more: 1\n"),
        ({"dataloader__shuffle": False}, "divisible: 64\n", "divisible: 64\n  shuffle: false\n"),
        ({"clip_grad_norm__max_norm": 2.0}, "  nodes: 1\n", "  nodes: 1\nclip_grad_norm:\n  max_norm: 2.0\n"),
        ({"step_scheduler__val_every_steps": None}, "  val_every_steps: 10\n", ""),
        ({"dataset__seq_length": None}, ", seq_length: 1000}", "}"),
        ({"peft__dim": None}, "ci:", "ci:"),
        ({"optimizer__betas": [0.9, 0.99]}, "[0.9, 0.95]", "[0.9, 0.99]"),
    ],
)
def test_a_changed_key_leaves_all_else_as_it_was(tmp_path: Path, keys: dict[str, Any], before: str, after: str) -> None:
    old, new = changed(tmp_path, **keys)
    assert old.count(before) == 1 and new == old.replace(before, after)
    wanted = flattened(yaml.safe_load(old))
    for path, value in keys.items():
        wanted |= {path.replace("__", "."): value}
    found = flattened(yaml.safe_load(new))
    assert found == {path: value for path, value in wanted.items() if value is not None}


def test_a_changed_workload_is_said_in_nested_keys(tmp_path: Path) -> None:
    found = workload_of(tmp_path, flags={"gpus": 2})
    other = found.replace({"train.per_device_train_batch_size": 4, "train.gradient_accumulation_steps": 8})
    assert found.origin is not None
    answer = answer_in(found.origin, found.to_mapping(), other.to_mapping())
    assert answer.keys == {"step_scheduler.local_batch_size": 4} and not answer.unsaid
    made = settings_in(found.origin, {"train.per_device_train_batch_size": 4})
    assert made == {"train.per_device_train_batch_size": 4, "train.gradient_accumulation_steps": 8}


def test_a_setting_that_the_recipe_does_otherwise_is_not_tried(tmp_path: Path) -> None:
    checkpointing = {"train.gradient_checkpointing": True}
    own, transformers = workload_of(tmp_path).origin, workload_of(tmp_path, MISTRAL).origin
    assert own is not None and transformers is not None
    assert settings_in(own, checkpointing) is None
    assert settings_in(transformers, checkpointing) is not None


def test_context_parallelism_is_that_of_accelerate(tmp_path: Path) -> None:
    found = workload_of(tmp_path, flags={"gpus": 4}, distributed__cp_size=2)
    assert (found.parallel.cp_size, found.parallel.strategy) == (2, "fsdp2")
    assert found.train.gradient_accumulation_steps == 4  # two data-parallel ranks
    with pytest.raises(WorkloadError, match="does not give the 3 GPUs"):
        workload_of(tmp_path, flags={"gpus": 3}, distributed__cp_size=2)


def test_a_launcher_does_not_say_the_number_of_gpus(tmp_path: Path) -> None:
    """Accumulation follows from it, and the recipe would have to be read again."""
    with pytest.raises(WorkloadError, match="--launch: does not go with a recipe"):
        workload_of(tmp_path, flags={"launch": "torchrun --nproc-per-node 2 train.py"})
