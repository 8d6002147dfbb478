"""Commands and configurations of ms-swift, and the scripts of the shell that hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainatomy.errors import WorkloadError
from trainatomy.workload.reading import read
from trainatomy.workload.shell import commands_in

SFT = "swift sft --model Qwen/Qwen2.5-0.5B --dataset swift/self-cognition#500 --torch_dtype bfloat16 --max_length 1024"


def problem(command: str) -> str:
    with pytest.raises(WorkloadError) as caught:
        read(command)
    return str(caught.value)


def test_a_command_has_the_defaults_of_ms_swift() -> None:
    workload = read(SFT)
    model, train, data = workload.model, workload.train, workload.data
    lora = model.lora
    assert lora is not None
    assert (lora.r, lora.lora_alpha, lora.lora_dropout, lora.target_modules) == (8, 32, 0.05, "all-linear")
    assert model.freeze_vision_tower and model.freeze_multi_modal_projector and model.dtype == "bfloat16"
    assert (train.per_device_train_batch_size, train.gradient_accumulation_steps) == (1, 16)
    assert train.gradient_checkpointing and train.gradient_checkpointing_kwargs == {"use_reentrant": True}
    assert (train.bf16, train.fp16, train.eval_strategy) == (True, False, "no")
    assert (data.sequence_length, data.attention_mask) == (1024, True)
    assert workload.origin is not None
    assert "16 accumulation steps, for 16 samples (gradient_accumulation_steps)" in workload.origin.assumed
    assert "gradient checkpointing is on (gradient_checkpointing)" in workload.origin.assumed


def test_processes_share_the_samples_and_checkpoint_without_reentry() -> None:
    workload = read(f"NPROC_PER_NODE=4 CUDA_VISIBLE_DEVICES=0,1,2,3 {SFT} --split_dataset_ratio 0.01")
    assert (workload.parallel.gpus, workload.train.gradient_accumulation_steps) == (4, 4)
    assert workload.train.gradient_checkpointing_kwargs == {"use_reentrant": False}
    assert workload.train.eval_strategy == "steps"
    assert "set NPROC_PER_NODE=2" in problem(f"CUDA_VISIBLE_DEVICES=0,1 {SFT}")
    assert problem(f"NPROC_PER_NODE=$n {SFT}") == (
        "swift sft: NPROC_PER_NODE: is '$n', which the script does not set: write a number"
    )


def test_presets_are_the_files_that_they_stand_for() -> None:
    workload = read(f"NPROC_PER_NODE=2 {SFT} --deepspeed zero2")
    assert workload.train.deepspeed is not None
    assert workload.train.deepspeed["zero_optimization"]["reduce_bucket_size"] == 200_000_000
    assert workload.train.gradient_checkpointing_kwargs == {"use_reentrant": True}
    sharded = read(f"NPROC_PER_NODE=2 {SFT} --fsdp fsdp2").train
    assert sharded.fsdp_config is not None and sharded.fsdp_config["activation_checkpointing"]
    assert not sharded.gradient_checkpointing


@pytest.mark.parametrize(
    ("model", "variables", "limits"),
    [
        ("Qwen2.5-VL-7B-Instruct", "MAX_PIXELS=602113", (3136, 602112)),
        ("Qwen3-VL-4B-Instruct", "IMAGE_MAX_TOKEN_NUM=300 MAX_PIXELS=602112", (4096, 300 * 32**2)),
        ("Qwen3.5-4B", "MIN_PIXELS=50176", (50176, 16384 * 32**2)),
        ("Qwen2.5-VL-7B-Instruct", "VIDEO_MAX_PIXELS=50176", None),
        ("Qwen2.5-7B-Instruct", "MAX_PIXELS=602112", None),
    ],
)
def test_variables_limit_the_images_of_qwens_models(model: str, variables: str, limits: Any) -> None:
    workload = read(f"{variables} swift sft --model Qwen/{model} --torch_dtype bfloat16 --max_length 1024")
    assert workload.data.image_limits == limits
    assert workload.origin is not None
    assert any("no videos" in text for text in workload.origin.assumed) == variables.startswith("VIDEO")


def test_vera_adapts_the_layers_of_one_name() -> None:
    vera = f"{SFT} --tuner_type vera --vera_rank 64 --target_modules"
    assert read(f"{vera} down_proj").model.peft == {
        "peft_type": "VERA", "target_modules": ["down_proj"], "r": 64, "vera_dropout": 0.0, "d_initial": 0.1,
    }  # fmt: skip
    assert "vera: not simulated without target_modules" in problem(f"{vera} all-linear")


def test_towers_that_are_frozen_need_no_checkpoints() -> None:
    assert read(f"{SFT} --vit_gradient_checkpointing false").train.gradient_checkpointing
    trained = f"{SFT} --vit_gradient_checkpointing false --freeze_vit false"
    assert "checkpointing of the tower alone" in problem(trained)


def test_a_classification_has_a_head_of_its_own() -> None:
    workload = read(f"{SFT} --num_labels 3 --problem_type multi_label_classification --group_by_length true")
    assert workload.model.class_ == "AutoModelForSequenceClassification"
    assert workload.model.config == {"num_labels": 3, "problem_type": "multi_label_classification"}
    assert workload.model.lora is not None and workload.model.lora.task_type == "SEQ_CLS"
    assert workload.train.train_sampling_strategy == "group_by_length"
    assert workload.origin is not None and not any("in the loss" in text for text in workload.origin.assumed)
    assert "reranker: not simulated: its loss" in problem(f"{SFT} --task_type reranker")
    assert read(f"{SFT} --train_dataloader_shuffle false").train.train_sampling_strategy == "sequential"


def test_images_of_any_model_are_scaled_to_max_pixels() -> None:
    command = "swift sft --model llava-hf/llava-1.5-7b-hf --max_pixels 262144 --max_length 512"
    assert read(command).data.image_pixels == (1, 262144)
    assert read(SFT + " --max_pixels 262144").data.image_pixels is None
    limited = f"{command} --model Qwen/Qwen2-VL-2B-Instruct --model_kwargs"
    assert read(limited + """ '{"max_pixels": 602112}'""").data.image_limits == (3136, 602112)
    assert "--model_kwargs: MAX_PIXELS: is 'many'" in problem(limited + """ '{"max_pixels": "many"}'""")
    assert "--model_kwargs: is no JSON" in problem(limited + " '{'")


def test_quantised_weights_are_not_prepared() -> None:
    quantization = read(f"{SFT} --quant_method bnb --quant_bits 4").model.quantization
    assert quantization is not None and quantization.load_in_4bit and quantization.bnb_4bit_use_double_quant
    assert quantization.bnb_4bit_compute_dtype == "bfloat16" and not quantization.prepare_model_for_kbit_training


def test_packs_need_flash_attention() -> None:
    assert "needs attn_impl: flash_attn" in problem(f"{SFT} --packing true")
    packed = read(f"{SFT} --packing true --attn_impl flash_attn --per_device_train_batch_size 2")
    assert packed.model.attn_implementation == "flash_attention_2" and not packed.data.attention_mask


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--lora_rnk 8", "swift sft: --lora_rnk: is no key of ms-swift 4.6.0.dev; did you mean lora_rank"),
        ("--lora_rank abc", "swift sft: --lora_rank: must be a whole number"),
        ("--tuner_type adalora", "swift sft: --tuner_type: adalora: not simulated"),
        ("--loss_scale hermes", "swift sft: --loss_scale: hermes: not simulated: a loss that weighs tokens"),
        ("--task_type embedding", "swift sft: --task_type: embedding: not simulated"),
        ("--optimizer muon", "swift sft: --optimizer: muon: not simulated"),
        ("--quant_method hqq --quant_bits 4", "swift sft: --quant_method: hqq: not simulated"),
        ("--init_weights pissa", "swift sft: --init_weights: pissa: not simulated"),
        ("--sequence_parallel_size 2", "swift sft: --sequence_parallel_size: not simulated"),
        ("--deepspeed nowhere.json", "swift sft: --deepspeed: no such file: nowhere.json"),
        ("--adapters output/checkpoint", "swift sft: --adapters: not simulated: an adapter that is loaded"),
        ("--seed $SEED", "swift sft: --seed: is a template ($SEED)"),
        ("--num_labels '<labels>'", "swift sft: --num_labels: must be a whole number above 0"),
    ],
)
def test_what_is_wrong_or_not_simulated_is_named(options: str, message: str) -> None:
    assert message in problem(f"{SFT} {options}")


@pytest.mark.parametrize("kind", ["gkd", "ppo", "grpo"])
def test_trainers_of_its_own_are_refused_with_what_helps(kind: str) -> None:
    found = problem(f"swift rlhf --rlhf_type {kind} --model Qwen/Qwen2.5-0.5B --num_generations 8")
    assert found.startswith(f"swift rlhf: --rlhf_type: {kind}: not simulated") and "trainatomy run swift" in found
    assert "megatron sft" in problem("megatron sft --mcore_model x") and "\n" not in found


def test_a_configuration_file_says_the_same(tmp_path: Path) -> None:
    file = tmp_path / "sft.yaml"
    file.write_text("model: Qwen/Qwen2.5-0.5B\ntuner_type: full\nmax_length: 512\nENV: {NPROC_PER_NODE: 2}\n")
    workload = read(file)
    assert (workload.parallel.gpus, workload.model.lora, workload.data.sequence_length) == (2, None, 512)
    assert read(f"swift sft {file} --max_length 256").data.sequence_length == 256


def test_a_script_is_read_as_the_shell_does(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(
        "# 22GB, isn't it\nn=2\nPYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \\\n"
        "CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0,1} NPROC_PER_NODE=$n \\\n"
        "swift sft --model LLM-Research/Meta-Llama-3.1-8B --dataset 'a#b' swift/x#500 \\\n"
        "  --gradient_accumulation_steps $(expr 16 / $n) --max_length $((n * 512)) --lora_rank 16 > log 2>&1 &\n"
    )
    workload = read(script)
    assert (workload.parallel.gpus, workload.train.gradient_accumulation_steps) == (2, 8)
    assert workload.data.sequence_length == 1024 and workload.allocator == "expandable_segments:True"
    assert workload.model.lora is not None and workload.model.lora.r == 16


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a 'x y' b#c # d", [["a", "x y", "b#c"]]),
        ("cd x && a --b '<c>' | tee log", [["cd", "x"], ["a", "--b", "<c>"], ["tee", "log"]]),
        ("a \\\n --b 'c\nd' 2>&1 > log; e", [["a", "--b", "c\nd"], ["e"]]),
        ("# it's\nnohup a &", [["a"]]),
    ],
)
def test_words_of_commands(text: str, words: list[list[str]]) -> None:
    assert [found for found, _ in commands_in(text)] == words
