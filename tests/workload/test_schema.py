"""The workload description as a value: defaults, contradictions, round trips and digests."""

# ruff: noqa: E501 - tables read better in long lines

from __future__ import annotations

import re
import subprocess
import sys
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from trainatomy.catalog.gpus import find_gpu
from trainatomy.errors import WorkloadError
from trainatomy.workload import GPUOverride, LoraSpec, ModelSpec, TrainSpec, Workload
from trainatomy.workload.overlay import set_key
from trainatomy.workload.overrides import merge
from trainatomy.workload.section import leaves

GPT2: dict[str, Any] = {"model": {"id": "gpt2"}}


def refusal(**sections: Any) -> list[str]:
    """Return the lines of the error that a mapping causes."""
    with pytest.raises(WorkloadError) as error:
        Workload.from_mapping({**GPT2, **sections})
    return str(error.value).splitlines()


def test_only_the_model_is_required() -> None:
    workload = Workload.from_mapping(GPT2)
    assert (workload.loop, workload.mode, workload.gpu) == ("trainer", "training", "h200")
    assert workload.to_mapping() == GPT2
    assert workload == Workload(model=ModelSpec(id="gpt2"))


def test_class_is_a_key_and_class_underscore_the_attribute() -> None:
    for key in ("class", "class_"):
        workload = Workload.from_mapping({"model": {key: "BertModel", "config": {"num_labels": 3}}})
        assert workload.model.class_ == "BertModel"
        assert workload.to_mapping()["model"] == {"class": "BertModel", "config": {"num_labels": 3}}


@pytest.mark.parametrize("spelling", ["bf16", "torch.bfloat16", "bfloat16"])
def test_dtype_may_be_spelt_as_in_torch(spelling: str) -> None:
    assert ModelSpec(id="gpt2", dtype=spelling).dtype == "bfloat16"  # type: ignore[arg-type]


def test_a_workload_is_frozen_and_hashable() -> None:
    workload = Workload.from_mapping(GPT2)
    with pytest.raises(ValueError, match="frozen"):
        workload.loop = "pytorch"  # type: ignore[misc]
    assert {workload: 1}[Workload.from_mapping(GPT2)] == 1


def test_inference_uses_the_training_batch_size_by_default() -> None:
    train = {"per_device_train_batch_size": 4}
    assert Workload.from_mapping({**GPT2, "mode": "inference", "train": train}).batch_size == 4
    train["per_device_eval_batch_size"] = 16
    assert Workload.from_mapping({**GPT2, "mode": "inference", "train": train}).batch_size == 16
    assert Workload.from_mapping({**GPT2, "train": train}).batch_size == 4


def test_arguments_that_change_nothing_are_set_aside_with_their_values() -> None:
    pasted = {"output_dir": "out", "hub_token": "secret", "fsdp": [], "torchdynamo": False, "bf16": True}
    workload = Workload.from_mapping({**GPT2, "train": pasted})
    assert workload.train.ignored == ("output_dir", "hub_token", "torchdynamo")
    assert workload.train.bf16
    assert workload == Workload.from_mapping({**GPT2, "train": {"bf16": True}})
    assert "secret" not in repr(workload) + workload.to_yaml()


@pytest.mark.parametrize(
    ("text", "values"),
    [
        (None, {}),
        ("", {}),
        ("foreach=False, fused=false", {"foreach": False, "fused": False}),
        ("momentum=0.9,nesterov=True", {"momentum": 0.9, "nesterov": True}),
        ("rank=64,proj_type=std", {"rank": 64, "proj_type": "std"}),
    ],
)
def test_optimizer_arguments_are_values(text: str | None, values: dict[str, Any]) -> None:
    assert TrainSpec(optim_args=text).optimizer_arguments() == values


def test_lora_arguments_are_what_differs_from_peft() -> None:
    lora = LoraSpec(r=16, target_modules=("q_proj", "v_proj"))
    assert lora.arguments() == {"r": 16, "target_modules": ["q_proj", "v_proj"]}


def test_a_gpu_can_be_changed() -> None:
    gpu = Workload.from_mapping(
        {**GPT2, "gpu": {"base": "a100-80gb", "memory_bytes": "2 TiB", "context_bytes": 7}}
    ).resolve_gpu()
    assert (gpu.memory_bytes, gpu.capability) == (2 * 2**40, (8, 0))
    assert {(context.first_tensor_bytes, context.holding(["cublas"])) for context in gpu.contexts.values()} == {(7, 7)}
    assert Workload.from_mapping({**GPT2, "gpu": "H100"}).resolve_gpu().id == "h100-sxm"
    assert GPUOverride(capability=9.0).resolve_gpu().capability == (9, 0)  # type: ignore[arg-type]


def test_the_example_in_the_message_about_unknown_gpus_describes_one() -> None:
    with pytest.raises(WorkloadError) as error:
        find_gpu("rtx-4090-d")
    described = yaml.safe_load(str(error.value).partition("workload's file: ")[2])
    described["gpu"]["rates_flop_per_second"] = {"bf16": 147.0e12}
    gpu = Workload.from_mapping({**GPT2, **described}).resolve_gpu()
    assert (gpu.memory_bytes, gpu.multiprocessors, gpu.bandwidth_bytes_per_second) == (24 * 2**30, 114, 1.008e12)
    assert (gpu.rates["bf16"], gpu.rates["fp16"]) == (147.0e12, find_gpu("rtx-4090").rates["fp16"])


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"model": {}}, "model: names no model: give `id`, or `class` with `config`, or `factory`"),
        ({"model": {"id": "x", "factory": "a:b"}}, "model.id: cannot be combined with `factory`, which builds the model"),
        ({"model": {"factory": "a:b", "dtype": "bf16"}}, "model.dtype: cannot be combined with `factory`, which builds the model"),
        ({"model": {"factory": "build"}}, 'model.factory: must look like "package.module:function" or "path/to/file.py:function"'),
        ({"model": {"factory": "a b:c"}}, 'model.factory: must look like "package.module:function" or "path/to/file.py:function"'),
        ({"model": {"factory": "f.py:3"}}, "model.factory: '3' is not the name of a function"),
        ({"model": {"id": "x", "lora": {}, "freeze": ["*"]}}, "model.freeze: cannot be combined with lora, which freezes everything but the adapters"),
        ({"model": {"id": "x", "lora": {"r": 0}}}, "model.lora.r: must be at least 1, found 0"),
        ({"data": {"factory": "a:b", "padding": True}}, "data.padding: cannot be combined with `factory`, which makes the batch"),
        ({"data": {"sequence_length": 0}}, "data.sequence_length: must be at least 1, found 0"),
        ({"data": {"sequence_length": 12.5}}, "data.sequence_length: must be a whole number, found 12.5"),
        ({"data": {"sequence_length": True}}, "data.sequence_length: must be a number, found true"),
        ({"train": {"fp16": True, "bf16": True}}, "train.fp16: cannot be combined with bf16: choose one precision"),
        ({"train": {"fp16": "maybe"}}, "train.fp16: must be true or false, found 'maybe'"),
        ({"train": {"per_device_train_batch_size": 0}}, "train.per_device_train_batch_size: must be at least 1, found 0"),
        ({"train": {"learning_rate": -1}}, "train.learning_rate: must be at least 0, found -1"),
        ({"train": {"adam_beta1": 1}}, "train.adam_beta1: must be below 1, found 1"),
        ({"train": {"max_grad_norm": float("nan")}}, "train.max_grad_norm: must be a number, found nan"),
        ({"train": {"optim": "adamw_torch_fussed"}}, "train.optim: unknown optimizer 'adamw_torch_fussed'; did you mean adamw_torch_fused"),
        ({"train": {"optim": "adamw_hf"}}, "train.optim: adamw_hf left transformers in 5.0; write trainatomy.training.adamw_hf.AdamW"),
        ({"train": {"optim_args": "momentum"}}, 'train.optim_args: must look like "momentum=0.9,nesterov=True"; found \'momentum\''),
        ({"train": {"deepspeed": "no-such-file.json"}}, "train.deepspeed: cannot read no-such-file.json"),
        ({"train": {"torch_compile_backend": "aot_eager"}}, "train.torch_compile_backend: 'aot_eager' is not simulated; the code of inductor, the default, is"),
        ({"train": {"torch_compile_mode": "fastest"}}, "train.torch_compile_mode: 'fastest' is no mode of torch.compile; default, reduce-overhead, max-autotune and max-autotune-no-cudagraphs are"),
        ({"train": {"dynamo_use_regional_compilation": True}}, "train.dynamo_use_regional_compilation: needs torch_compile: true"),
        ({"train": {"torch_compile": True}, "parallel": {"gpus": 2, "strategy": "dp"}}, "train.torch_compile: is not simulated with DataParallel"),
        ({"train": {"per_gpu_train_batch_size": 1}}, "train.per_gpu_train_batch_size: is called per_device_train_batch_size today"),
        ({"train": {"gradient_checkpointing_kwargs": {"use_reentrent": True}}}, "train.gradient_checkpointing_kwargs.use_reentrent: unknown key; did you mean use_reentrant?"),
        ({"train": {"gradient_checkpointing_every": 2}}, "train.gradient_checkpointing_every: needs gradient_checkpointing: true"),
        ({"train": {"gradient_checkpointing": True, "gradient_checkpointing_every": 0}}, "train.gradient_checkpointing_every: must be at least 1, found 0"),
        ({"train": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 0}}}, "train.gradient_checkpointing_kwargs.every_n_layers: must be a whole number of at least 1, found 0"),
        ({"train": {"gradient_checkpointing": True, "gradient_checkpointing_every": 3, "gradient_checkpointing_kwargs": {"every_n_layers": 2}}}, "train.gradient_checkpointing_kwargs.every_n_layers: is 2, but gradient_checkpointing_every is 3: set one of the two"),
        ({"train": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": "yes"}}}, "train.gradient_checkpointing_kwargs.offload: must be true or false, found 'yes'"),
        ({"train": {"torch_compile": True, "gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"offload": True}}}, "train.gradient_checkpointing_kwargs.offload: is not simulated with train.torch_compile"),
        ({"activation_offloading": "pinned"}, "activation_offloading: is for loop: pytorch; with loop: trainer there is train.gradient_checkpointing_kwargs: {offload: true}"),
        ({"activation_offloading": "cpu", "loop": "pytorch"}, "activation_offloading: must be 'pinned' or 'pageable', found 'cpu'"),
        ({"activation_offloading": "pinned", "loop": "pytorch", "mode": "inference"}, "activation_offloading: keeps what backward needs; mode: inference has no backward"),
        ({"activation_offloading": "pinned", "loop": "pytorch", "train": {"torch_compile": True}}, "activation_offloading: is not simulated with train.torch_compile"),
        ({"activation_offloading": "pinned", "loop": "pytorch", "parallel": {"gpus": 2, "strategy": "dp"}}, "activation_offloading: is not simulated with DataParallel"),
        ({"activation_offloading": "pinned", "loop": "pytorch", "parallel": {"gpus": 2, "pp_size": 2}}, "activation_offloading: is not simulated with a pipeline"),
        ({"train": {"every_n_layers": 2}}, "train.every_n_layers: unknown key; did you mean gradient_checkpointing_every?"),
        ({"loop": "torch"}, "loop: must be 'trainer', 'sft', 'dpo', 'kto', 'reward', 'grpo', 'preference', 'sentence_transformers' or 'pytorch', found 'torch'; did you mean pytorch?"),
        ({"loop": "pytorch", "train": {"neftune_noise_alpha": 5}}, "train.neftune_noise_alpha: is applied by the Hugging Face Trainer"),
        ({"sequence_length": 512}, "sequence_length: unknown key here; it belongs under `data`"),
        ({"output_dir": "x"}, "output_dir: unknown key here; it belongs under `train`"),
        ({"model": {"id": "x", "gpu": "h100"}}, "model.gpu: unknown key here; it belongs under no section"),
        ({"gpu": "h1000"}, "gpu: unknown GPU 'h1000'; did you mean h100"),
        ({"gpu": {"memory": 3}}, "gpu.memory: unknown key; did you mean memory_bytes?"),
        ({"gpu": {"memory_bytes": "80 GB"}}, 'gpu.memory_bytes: must be bytes, or a size such as "80 GiB" (KiB, MiB, GiB or TiB)'),
        ({"gpu": {"memory_bytes": 5, "context_bytes": 5}}, "gpu.context_bytes: is as large as the GPU's memory"),
        ({"software": {"torch": 2.1}}, 'software.torch: is read as a number: put it in quotes, as in torch: "2.10"'),
        ({"software": {"torch": "latest"}}, 'software.torch: must be a version such as "2.11" or "2.11.0"'),
        ({"allocator": "expandable_segments"}, 'allocator: must look like "expandable_segments:True,max_split_size_mb:128", found'),
        ({"model": "gpt2"}, "model: must be a mapping; write `model: {id: gpt2}`"),
        ({"model": {"id": "x", "lora": {"target_modules": 3}}}, "model.lora.target_modules: must be a string or a list, found 3"),
    ],
)  # fmt: skip
def test_impossible_values_are_refused_once_by_key(sections: dict[str, Any], expected: str) -> None:
    found = refusal(**sections)
    assert len(found) == 1
    assert found[0].startswith(expected)


def test_every_problem_is_listed() -> None:
    found = refusal(train={"fp61": True, "fp16": True, "bf16": True, "max_grad_norm": "big"}, gpus="h100", steps=0)
    assert sorted(line.partition(": ")[0] for line in found) == [
        "gpus",
        "steps",
        "train.fp16",
        "train.fp61",
        "train.max_grad_norm",
    ]


@pytest.mark.parametrize(
    ("model", "train", "mode", "refused"),
    [
        ({}, {}, "training", True),
        ({"lora": {}}, {}, "training", False),
        ({}, {}, "inference", False),
        ({}, {"max_grad_norm": 0}, "training", False),
        ({}, {"max_grad_norm": 0, "optim": "sgd"}, "training", True),
        ({"dtype": "bfloat16"}, {}, "training", False),
    ],
)
def test_gradient_scaling_refuses_float16_weights(
    model: dict[str, Any], train: dict[str, Any], mode: str, refused: bool
) -> None:
    mapping = {"model": {"id": "x", "dtype": "float16", **model}, "train": {"fp16": True, **train}, "mode": mode}
    if not refused:
        assert Workload.from_mapping(mapping).train.fp16
        return
    with pytest.raises(WorkloadError, match=r"train\.fp16: gradient scaling cannot unscale"):
        Workload.from_mapping(mapping)


SECTIONS = st.fixed_dictionaries(
    {"model": st.fixed_dictionaries({"id": st.sampled_from(["gpt2", "a/b"])}, optional={
        "class": st.just("GPT2LMHeadModel"),
        "dtype": st.sampled_from(["float32", "bfloat16"]),
        "config": st.dictionaries(st.sampled_from("ab"), st.integers() | st.booleans() | st.text() | st.none()),
        "lora": st.fixed_dictionaries({}, optional={"r": st.integers(1, 64), "target_modules": st.lists(st.text(min_size=1))}),
    })},
    optional={
        "name": st.text(min_size=1),
        "data": st.fixed_dictionaries({}, optional={"sequence_length": st.integers(1, 10**6), "padding": st.booleans()}),
        "train": st.fixed_dictionaries({}, optional={
            "fp16": st.booleans(), "tf32": st.booleans() | st.none(), "learning_rate": st.floats(0, 1), "seed": st.integers(0, 9),
        }),
        "gpu": st.sampled_from(["h100", "t4"]) | st.fixed_dictionaries({"memory_bytes": st.integers(1, 2**50)}),
        "steps": st.integers(1, 9),
    },
)  # fmt: skip


@given(SECTIONS)
def test_written_records_can_be_read(mapping: dict[str, Any]) -> None:
    workload = Workload.from_mapping(mapping)
    again = Workload.from_mapping(yaml.safe_load(workload.to_yaml()))
    assert again == workload
    assert again.model_dump() == workload.model_dump()
    assert again.digest() == workload.digest()


def test_the_digest_is_that_of_the_training() -> None:
    digest = Workload.from_mapping(GPT2).digest()
    same = [{"name": "mine"}, {"train": {"output_dir": "x"}}, {"train": {"seed": 42}}, {"gpu": "h200"}]
    other = [{"train": {"seed": 1}}, {"gpu": "h100"}, {"data": {"padding": True}}, {"mode": "inference"}]
    assert {Workload.from_mapping({**GPT2, **sections}).digest() for sections in same} == {digest}
    assert (
        len({digest, *(Workload.from_mapping({**GPT2, **sections}).digest() for sections in other)}) == len(other) + 1
    )


def test_the_digest_is_the_same_in_another_process() -> None:
    code = "from trainatomy.workload import Workload; print(Workload.from_mapping({'model': {'id': 'gpt2'}}).digest())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == Workload.from_mapping(GPT2).digest()


def test_a_description_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, trainatomy.workload; print({'torch', 'transformers', 'peft', 'accelerate'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_relevant_settings_that_are_not_simulated_cause_a_note() -> None:
    pasted = {
        "do_predict": True,
        "label_names": ["start_positions"],
        "auto_find_batch_size": True,
        "debug": [],
        "hub_token": "x",
    }
    train = Workload.from_mapping({"model": {"id": "gpt2"}, "train": pasted}).train
    assert [note.partition(": ")[0] for note in train.notes()] == [
        "train.do_predict",
        "train.label_names",
        "train.auto_find_batch_size",
    ]
    off = {
        "do_predict": False,
        "load_best_model_at_end": None,
        "train_sampling_strategy": "random",
    }
    assert Workload.from_mapping({"model": {"id": "gpt2"}, "train": off}).train.notes() == ()


def test_notes_survive_flags_over_a_file() -> None:
    base = Workload.from_mapping({"model": {"id": "gpt2"}, "train": {"do_predict": True}})
    assert len(merge(base, {"bf16": True}).train.notes()) == 1
    assert merge(base, {"do_predict": False}).train.notes() == ()
    assert len(merge(None, {"model": "gpt2", "do_predict": True}).train.notes()) == 1


def test_the_trainers_name_for_every_nth_layer_means_the_same() -> None:
    pasted = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2, "offload": False}}
    found = Workload.from_mapping({"model": {"id": "gpt2"}, "train": pasted})
    ours = {"gradient_checkpointing": True, "gradient_checkpointing_every": 2}
    assert found.train.gradient_checkpointing_kwargs is None
    assert found == Workload.from_mapping({"model": {"id": "gpt2"}, "train": ours})
    kept = found.replace("train.gradient_checkpointing_kwargs", {"every_n_layers": 2, "use_reentrant": True})
    assert kept.train.gradient_checkpointing_kwargs == {"use_reentrant": True}


@pytest.mark.parametrize("value", ["", [], {}, None, -1, "x\0"], ids=repr)
def test_no_message_is_pydantics(value: Any) -> None:
    for path, _ in leaves(Workload):
        mapping: dict[str, Any] = {"model": {"id": "gpt2"}}
        set_key(mapping, path, value)
        try:
            Workload.from_mapping(mapping)
        except WorkloadError as error:
            assert not re.search("Value error|Value should|Input should|after validation", str(error)), path


def test_an_empty_name_is_said_to_be_empty() -> None:
    with pytest.raises(WorkloadError, match="--model: is empty"):
        merge(None, {"model": ""})
