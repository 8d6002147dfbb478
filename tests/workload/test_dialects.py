"""Configurations of other frameworks: what they say as workloads, what is refused, and answers in their keys."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
import yaml
from configurations import problem, said, written

from trainatomy.errors import NotSimulated, TrainatomyError, WorkloadError
from trainatomy.workload.batching import batching_of
from trainatomy.workload.dialects.answer import answer_in, rewritten, settings_in
from trainatomy.workload.dialects.recognise import read_configuration
from trainatomy.workload.dialects.translation import DIALECTS, dialect
from trainatomy.workload.document import parse
from trainatomy.workload.reading import read
from trainatomy.workload.section import leaves
from trainatomy.workload.train import TrainSpec

LORA = """\
### model
model_name_or_path: Qwen/Qwen2.5-0.5B

stage: sft
do_train: true
finetuning_type: lora
lora_rank: 16
lora_target: q_proj,v_proj  # two of them
dataset: identity
template: qwen
cutoff_len: 512
output_dir: saves
per_device_train_batch_size: 4   # as before
gradient_accumulation_steps: 2
learning_rate: 1.0e-4
bf16: true
"""
ZERO_3 = {"zero_optimization": {"stage": 3}}


def test_llamafactory_trains_adapters_with_its_own_defaults(tmp_path: Path) -> None:
    workload = read(written(tmp_path, LORA), {"gpu": "l4"})
    model, train = workload.model, workload.train
    assert (model.id, model.dtype, model.trainable_dtype) == ("Qwen/Qwen2.5-0.5B", "auto", "float32")
    assert model.lora is not None and (model.lora.r, model.lora.lora_alpha) == (16, 32)
    assert model.lora.target_modules == ("q_proj", "v_proj")
    assert workload.data.sequence_length == 512 and workload.data.attention_mask
    assert train.gradient_checkpointing and train.gradient_checkpointing_kwargs == {"use_reentrant": True}
    assert (train.per_device_train_batch_size, train.gradient_accumulation_steps, train.bf16) == (4, 2, True)
    assert workload.origin is not None and workload.origin.name == "LLaMA-Factory"
    assert any("disable_gradient_checkpointing" in text for text in workload.origin.assumed)
    assert workload.where("model", "lora", "r").endswith("train.yaml:7: lora_rank")


def test_rotations_are_those_of_oft_on_the_layers_of_adapters(tmp_path: Path) -> None:
    """LLaMA-Factory has a key for OFT's layers, which it does not read."""
    text = LORA + "oft_block_size: 64\noft_target: all\n"
    model = said(tmp_path, text.replace("finetuning_type: lora", "finetuning_type: oft"))["model"]
    assert model["peft"]["peft_type"] == "OFT" and "lora" not in model
    assert (model["peft"]["oft_block_size"], model["peft"]["target_modules"]) == (64, ["q_proj", "v_proj"])
    four = text.replace("finetuning_type: lora", "finetuning_type: oft") + "quantization_bit: 4\n"
    assert "finetuning_type: oft: not simulated with quantised weights" in problem(tmp_path, four)


def test_llamafactory_casts_what_it_trains_unless_it_is_told_not_to(tmp_path: Path) -> None:
    full = LORA.replace("finetuning_type: lora", "finetuning_type: full")
    assert said(tmp_path, full)["model"] == {
        "id": "Qwen/Qwen2.5-0.5B",
        "freeze_vision_tower": True,
        "freeze_multi_modal_projector": True,
        "frozen_tower": "without_grad",
        "trainable_dtype": "float32",
    }
    assert "trainable_dtype" not in said(tmp_path, full + "pure_bf16: true\n")["model"]
    written(tmp_path, json.dumps(ZERO_3), "ds.json")
    sharded = said(tmp_path, full + "deepspeed: ds.json\n")
    assert "trainable_dtype" not in sharded["model"] and sharded["train"]["deepspeed"] == ZERO_3


def test_files_of_exports_and_chats_train_nothing(tmp_path: Path) -> None:
    export = "model_name_or_path: gpt2\ntemplate: default\nexport_dir: merged\n"
    assert problem(tmp_path, export).endswith(
        "train.yaml:3: export_dir: without do_train: true: the file trains nothing"
    )
    assert "export_dir" not in said(tmp_path, export + "do_train: true\n")
    workload = read(written(tmp_path, LORA.replace("do_train: true\n", "")))
    assert workload.origin is not None and any("do_train" in text for text in workload.origin.assumed)


def test_routers_have_a_loss_where_llamafactory_gives_them_one(tmp_path: Path) -> None:
    line = "moe_aux_loss_coef: 0.01\n"
    experts = LORA.replace("Qwen/Qwen2.5-0.5B", "mistralai/Mixtral-8x7B-v0.1") + line
    assert said(tmp_path, experts)["model"]["config"] == {"output_router_logits": True}
    assert "config" not in said(tmp_path, LORA + line)["model"]
    unknown = LORA.replace("Qwen/Qwen2.5-0.5B", "somebody/a-model") + line
    assert "moe_aux_loss_coef: not simulated: the loss of routers" in problem(tmp_path, unknown)
    assert said(tmp_path, LORA + "disable_shuffling: true\n")["train"]["train_sampling_strategy"] == "sequential"


def test_llamafactory_scales_images_before_the_processor(tmp_path: Path) -> None:
    seeing = LORA.replace("Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-VL-7B-Instruct")
    raw = said(tmp_path, seeing)
    assert raw["data"]["image_pixels"] == [1024, 589_824] and raw["data"]["float_dtype"] == "bfloat16"
    assert raw["model"]["frozen_tower"] == "kept" and "image_limits" not in raw["data"]
    assert said(tmp_path, seeing + "image_max_pixels: 262144\n")["data"]["image_pixels"] == [1024, 262_144]
    tiles = seeing.replace("template: qwen", "template: intern_vl")
    assert said(tmp_path, tiles)["data"]["image_limits"] == [1, 1]
    assert said(tmp_path, tiles + "crop_to_patches: true\n")["data"]["image_limits"] == [1, 12]
    assert "image_pixels" not in said(tmp_path, LORA)["data"]
    assert "image_max_pixels: is 9, below image_min_pixels of 1024" in problem(
        tmp_path, seeing + "image_max_pixels: 9\n"
    )


def test_llamafactory_quantises_with_the_dtype_of_the_training(tmp_path: Path) -> None:
    assert said(tmp_path, LORA + "quantization_bit: 4\n")["model"]["quantization"] == {
        "prepare_model_for_kbit_training": False,
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "bfloat16",
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("lora_rnk: 8", "/train.yaml:17: lora_rnk: is no key of LLaMA-Factory 0.9.6.dev; did you mean lora_rank"),
        ("use_unsloth: true", "/train.yaml:17: use_unsloth: not simulated: Unsloth's kernels"),
        ("pissa_init: true", "/train.yaml:17: pissa_init: not simulated"),
        ("deepspeed: nowhere.json", "/train.yaml:17: deepspeed: no such file: nowhere.json"),
        ("deepspeed: [zero3]", "/train.yaml:17: deepspeed: must name a file, found ['zero3']"),
        ("lora_dropout: much", "/train.yaml:17: lora_dropout: must be a number"),
        ("seed: ${SEED}", "/train.yaml:17: seed: is a template (${SEED})"),
        ("train_dataset: data/v1.yaml", "is a key of LLaMA-Factory's v1 trainer"),
        ("fp16: true", "/train.yaml:17: fp16: cannot be combined with bf16"),
        ("gpu: h100", "gpu: is a key of a workload, and the file is a configuration of LLaMA-Factory"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    assert message in problem(tmp_path, f"{LORA}{line}\n")


@pytest.mark.parametrize(
    ("line", "is_wrong"),
    [
        ("lora_rnk: 8", True),
        ("flash_attn: fa9", True),
        ("quantization_bit: 3", True),
        ("deepspeed: train.yaml", True),
        ("use_unsloth: true", False),
    ],
)
def test_what_is_wrong_is_told_apart_from_what_is_not_simulated(tmp_path: Path, line: str, is_wrong: bool) -> None:
    """A wrong value is wrong in the framework too, which need not be executed to learn it."""
    with pytest.raises(WorkloadError) as caught:
        read(written(tmp_path, f"{LORA}{line}\n"))
    assert isinstance(caught.value, NotSimulated) is not is_wrong


def test_a_broken_configuration_of_deepspeed_is_named_with_the_line_that_names_it(tmp_path: Path) -> None:
    written(tmp_path, '{"zero_optimization": {', "ds.json")
    message = problem(tmp_path, LORA + "deepspeed: ds.json\n")
    assert message.startswith("/train.yaml:17: deepspeed:") and "/ds.json" in message and "\n" not in message


@pytest.mark.parametrize("stage", ["ppo"])
def test_trainers_that_are_not_simulated_are_refused_with_what_helps(tmp_path: Path, stage: str) -> None:
    found = problem(tmp_path, LORA.replace("stage: sft", f"stage: {stage}"))
    assert f"stage: {stage}: not simulated" in found and "trainatomy run llamafactory-cli train" in found


def test_keys_that_are_off_are_no_reason_to_refuse(tmp_path: Path) -> None:
    read(written(tmp_path, LORA + "use_unsloth: false\nuse_galore: false\nresize_vocab: false\nreport_to: none\n"))


def test_a_command_says_what_its_file_and_its_options_say(tmp_path: Path) -> None:
    file = written(tmp_path, LORA)
    workload = read(f"NPROC_PER_NODE=2 llamafactory-cli train {file} cutoff_len=1024 lora_rank=4")
    assert workload.model.lora is not None and workload.model.lora.r == 4
    assert (workload.data.sequence_length, workload.parallel.gpus) == (1024, 2)
    launched = read(f"torchrun --nproc-per-node 4 src/train.py {file}")
    assert launched.parallel.gpus == 4 and launched.train.ddp_find_unused_parameters is False
    with pytest.raises(WorkloadError, match="llamafactory-cli train: --cutoff_len: must be a whole number"):
        read(f"llamafactory-cli train {file} cutoff_len=abc")


def test_the_command_sets_the_allocator_on_several_gpus(tmp_path: Path) -> None:
    file = written(tmp_path, LORA)
    assert read(file).allocator == ""
    assert read(file, {"gpus": 2}).allocator == "expandable_segments:True"
    assert read(file, {"gpus": 2, "allocator": "max_split_size_mb:64"}).allocator == "max_split_size_mb:64"
    assert read(f"torchrun --nproc-per-node 2 src/train.py {file}").allocator == ""


def test_a_script_of_the_shell_holds_a_command(tmp_path: Path) -> None:
    script = (
        "#!/bin/bash\n# trains\nexport NPROC_PER_NODE=2\ntrl sft \\\n  --model_name_or_path openai-community/gpt2 \\\n"
    )
    workload = read(written(tmp_path, script + "  --max_length 256 --use_peft --dtype bfloat16\n", "train.sh"))
    assert (workload.loop, workload.parallel.gpus, workload.data.sequence_length) == ("sft", 2, 256)
    with pytest.raises(WorkloadError, match="holds none of the commands that are read, such as `llamafactory-cli"):
        read(written(tmp_path, "python train.py\n", "other.sh"))


def test_trl_has_defaults_of_its_own(tmp_path: Path) -> None:
    text = "model_name_or_path: openai-community/gpt2\ndataset_name: imdb\nuse_peft: true\n"
    workload = read(written(tmp_path, text))
    assert (workload.loop, workload.model.dtype, workload.data.sequence_length) == ("sft", "float32", 1024)
    lora = workload.model.lora
    assert lora is not None and (lora.r, lora.lora_alpha, lora.lora_dropout) == (16, 32, 0.05)
    pairs = read(f"trl dpo --config {tmp_path}/train.yaml --beta 0.2 --max_length 512")
    assert (pairs.loop, pairs.data.prompt_length, pairs.trl["beta"]) == ("dpo", 256, 0.2)


def test_a_workload_is_no_configuration(tmp_path: Path) -> None:
    workload = read(written(tmp_path, "model: {id: openai-community/gpt2}\ntrain: {bf16: true}\n"))
    assert workload.origin is None


def test_changed_keys_leave_everything_else_as_it_was(tmp_path: Path) -> None:
    workload = read(written(tmp_path, LORA))
    changed = workload.replace({"train.per_device_train_batch_size": 1, "train.gradient_checkpointing": False})
    assert workload.origin is not None
    change = answer_in(workload.origin, workload.to_mapping(), changed.to_mapping())
    assert change.keys == {"per_device_train_batch_size": 1, "disable_gradient_checkpointing": True}
    text = rewritten(workload.origin, change)
    expected = LORA.replace("per_device_train_batch_size: 4   #", "per_device_train_batch_size: 1   #")
    assert text == expected + "disable_gradient_checkpointing: true\n"
    assert (
        read(written(tmp_path, text)).to_mapping()
        == changed.replace("train.gradient_checkpointing_kwargs", None).to_mapping()
    )


def test_a_json_file_stays_one(tmp_path: Path) -> None:
    workload = read(written(tmp_path, json.dumps(yaml.safe_load(LORA), indent=2), "train.json"))
    assert workload.origin is not None
    change = answer_in(
        workload.origin, workload.to_mapping(), workload.replace("train.optim", "adafactor").to_mapping()
    )
    assert json.loads(rewritten(workload.origin, change)) == {**yaml.safe_load(LORA), "optim": "adafactor"}


def test_a_command_gets_further_options(tmp_path: Path) -> None:
    workload = read("trl sft --model_name_or_path openai-community/gpt2 --per_device_train_batch_size=8 --use_peft")
    assert workload.origin is not None
    changed = workload.replace(
        {"train.per_device_train_batch_size": 2, "train.optim": "adafactor", "allocator": "max_split_size_mb:64"}
    )
    change = answer_in(workload.origin, workload.to_mapping(), changed.to_mapping())
    assert change.outside == ("PYTORCH_ALLOC_CONF=max_split_size_mb:64 in the environment",)
    command = "trl sft --model_name_or_path openai-community/gpt2 --per_device_train_batch_size=2 --use_peft"
    assert rewritten(workload.origin, change) == f"{command} --optim adafactor\n"


def test_settings_become_what_the_framework_makes_of_them(tmp_path: Path) -> None:
    """LLaMA-Factory computes in the dtype of the training, and has no checkpoints of every second layer."""
    origin = read(written(tmp_path, LORA)).origin
    assert origin is not None
    asked = {"model.quantization": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"}}
    made = settings_in(origin, asked)
    assert made is not None and made["model.quantization.bnb_4bit_quant_storage"] == "bfloat16"
    assert made["model.quantization.bnb_4bit_quant_type"] == "fp4"
    assert settings_in(origin, {"train.gradient_checkpointing_every": 2}) is None
    assert settings_in(origin, {"allocator": "expandable_segments:True"}) == {"allocator": "expandable_segments:True"}


@pytest.mark.parametrize("name", DIALECTS)
def test_tables_name_keys_that_exist(name: str) -> None:
    """Each key of a framework has one place, and each key of a workload that a table names is one."""
    table = dialect(name)
    assert not table.keys.keys() & table.refused.keys() and not table.ignored.keys() & table.refused.keys()
    assert not table.keys.keys() & table.ignored.keys()
    from trainatomy.workload.schema import Workload

    known = {".".join(map(str, path)) for path, _ in leaves(Workload)} | {
        "model.lora",
        "model.quantization",
        "parallel.mp_policy",
    }
    named = {".".join(map(str, path)) for path in table.keys.values()} | table.says.keys() | table.implied
    assert {path for path in named if not path.startswith("trl.")} <= known
    assert not table.ignored.keys() & TrainSpec.model_fields.keys()


def test_a_key_of_our_own_is_none_of_a_frameworks(tmp_path: Path) -> None:
    """It is spelled like one of ``TrainingArguments``, beside which it stands."""
    message = problem(tmp_path, LORA + "gradient_checkpointing_every: 2\n")
    assert "/train.yaml:17: gradient_checkpointing_every: is no key of LLaMA-Factory" in message


def test_llamafactory_rounds_rows_up_to_a_multiple_of_8_but_in_pretraining(tmp_path: Path) -> None:
    odd = LORA.replace("cutoff_len: 512", "cutoff_len: 1003")
    data = read(written(tmp_path, odd)).data
    assert (data.sequence_length, data.pad_to_multiple_of, data.rounded_up(1003)) == (1003, 8, 1008)
    assert read(written(tmp_path, odd.replace("stage: sft", "stage: pt"))).data.pad_to_multiple_of is None
    with_lengths = read(written(tmp_path, odd)).replace({"data.lengths": {5: 2, 9: 3}})
    assert batching_of(with_lengths).rounded_up(9) == 16


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LORA + "flash_attn: fa3\n", "train.yaml:17: flash_attn: flash_attention_3: not simulated"),
        ("model_name_or_path: gpt2\ndataset_name: a/b\nattn_implementation: flash_attention_3\n",
         "train.yaml:3: attn_implementation: flash_attention_3: not simulated"),
    ],
)  # fmt: skip
def test_attention_that_is_not_simulated_is_refused_at_its_line(tmp_path: Path, text: str, message: str) -> None:
    assert message in problem(tmp_path, text)


_MODELS = {"llamafactory": "model_name_or_path", "axolotl": "base_model", "swift": "model", "trl": "model_name_or_path"}


@pytest.mark.parametrize("name", _MODELS)
def test_values_of_any_kind_are_read_or_named(name: str) -> None:
    """Give each key values that it does not have: nothing but an error of the workload comes out."""
    table = dialect(name)
    for key in sorted(table.known()):
        for value in ("x", -1.5, [1, "a"], {"a": 1}, True):
            content = {_MODELS[name]: "gpt2", key: value}
            text = yaml.safe_dump(content)
            with contextlib.suppress(TrainatomyError):
                read_configuration(parse(text, "train.yaml"), table, None, text).validate()
