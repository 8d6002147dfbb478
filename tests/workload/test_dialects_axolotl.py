"""Configurations of axolotl: what they say as workloads, what is assumed, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from configurations import problem, said, written

from trainatomy.errors import WorkloadError
from trainatomy.workload.reading import read

LORA = """\
base_model: Qwen/Qwen2.5-0.5B
adapter: lora
lora_r: 16
lora_alpha: 32
lora_target_linear: true
lora_mlp_kernel: false
datasets: [{path: mhenrichsen/alpaca_2k_test, type: alpaca}]
sequence_len: 2000
sample_packing: true
attn_implementation: flash_attention_2
micro_batch_size: 2
gradient_accumulation_steps: 4
gradient_checkpointing: true
optimizer: adamw_bnb_8bit
learning_rate: 2e-4
bf16: auto
"""


def without(text: str, *keys: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if line.partition(":")[0] not in keys)


def test_packed_adapters_are_trained_as_axolotl_does(tmp_path: Path) -> None:
    workload = read(written(tmp_path, LORA))
    model, train, data = workload.model, workload.train, workload.data
    assert (model.dtype, model.attn_implementation) == ("bfloat16", "flash_attention_2")
    assert model.lora is not None and (model.lora.r, model.lora.target_modules) == (16, "all-linear")
    assert (data.sequence_length, data.attention_mask) == (2048, False)  # 2,000 tokens, padded to a multiple of 64
    assert train.gradient_checkpointing_kwargs == {"use_reentrant": True}
    assert (train.bf16, train.tf32, train.average_tokens_across_devices) == (True, True, False)
    assert train.include_num_input_tokens_seen == "all" and train.ddp_find_unused_parameters is False
    assert (train.optim, train.learning_rate) == ("adamw_bnb_8bit", 2e-4)
    assert workload.origin is not None
    assert workload.allocator == "expandable_segments:True"
    assert workload.origin.assumed == (
        "the allocator has expandable segments (PYTORCH_ALLOC_CONF)",
        "the CPU waits in each micro-batch to count tokens (include_tkps)",
        "packs are full, each of one sample of 2,048 tokens (sequence_len, padded to a multiple of 64); the one row of "
        "a batch with 2 packs is computed as 2 rows",
    )


def test_the_order_of_samples_is_that_of_the_file(tmp_path: Path) -> None:
    padded = LORA.replace("sample_packing: true", "sample_packing: false")
    assert said(tmp_path, padded + "group_by_length: true\n")["train"]["train_sampling_strategy"] == "group_by_length"
    assert said(tmp_path, padded + "curriculum_sampling: true\n")["train"]["train_sampling_strategy"] == "sequential"
    assert "train_sampling_strategy" not in said(tmp_path, LORA + "group_by_length: true\n")["train"]
    assert "gc_collect_steps: not simulated: an allocator's cache" in problem(tmp_path, LORA + "gc_collect_steps: 5\n")


def test_images_have_the_size_to_which_axolotl_resizes_them(tmp_path: Path) -> None:
    """It names the width first; without a size, all images get that of the model's encoder."""
    assert said(tmp_path, LORA + "image_size: [640, 480]\n")["data"]["image_size"] == [480, 640]
    folder = tmp_path / "seeing"
    folder.mkdir()
    written(folder, json.dumps({"model_type": "llava", "vision_config": {"image_size": 336}}), "config.json")
    seeing = LORA.replace("Qwen/Qwen2.5-0.5B", str(folder))
    assert said(tmp_path, seeing)["data"]["image_size"] == [336, 336]
    assert said(tmp_path, seeing + "image_size: 512\n")["data"]["image_size"] == [512, 512]


def test_four_bits_end_in_the_dtype_of_the_training(tmp_path: Path) -> None:
    text = LORA.replace("adapter: lora", "adapter: qlora\nload_in_4bit: true")
    assert said(tmp_path, text)["model"]["quantization"] == {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "bfloat16",
        "prepare_model_for_kbit_training": False,
    }
    assert "with adapter: qlora only" in problem(tmp_path, LORA + "load_in_4bit: true\n")


def test_samples_are_padded_without_packing(tmp_path: Path) -> None:
    plain = said(tmp_path, LORA.replace("sample_packing: true", "sample_packing: false"))["data"]
    assert plain == {"sequence_length": 2048, "attention_mask": True}
    loose = LORA.replace("sample_packing: true", "pad_to_sequence_len: false")
    assert said(tmp_path, loose)["data"]["sequence_length"] == 2000


def test_evaluation_needs_data_and_an_interval(tmp_path: Path) -> None:
    assert "eval_strategy" not in said(tmp_path, LORA + "val_set_size: 0.1\n")["train"]
    train = said(tmp_path, LORA + "val_set_size: 0.1\nevals_per_epoch: 4\n")["train"]
    assert (train["eval_strategy"], train["eval_on_start"], train["eval_accumulation_steps"]) == ("steps", True, 4)
    assert "eval_strategy" not in said(tmp_path, LORA + "val_set_size: 0.0\nevals_per_epoch: 4\n")["train"]


def test_liger_has_the_kernels_that_are_named(tmp_path: Path) -> None:
    plugin = "plugins: [axolotl.integrations.liger.LigerPlugin]\n"
    train = said(tmp_path, LORA + plugin + "liger_rms_norm: true\nliger_glu_activation: true\n")["train"]
    assert train["use_liger_kernel"] and train["liger_kernel_config"] == {
        "rope": False,
        "rms_norm": True,
        "layer_norm": False,
        "swiglu": True,
        "geglu": True,
        "cross_entropy": False,
        "fused_linear_cross_entropy": False,
    }
    assert "use_liger_kernel" not in said(tmp_path, LORA + "liger_rms_norm: true\n")["train"]


def test_fsdp_of_the_first_version_is_the_trainers(tmp_path: Path) -> None:
    text = without(LORA, "adapter", "lora_r", "lora_alpha", "lora_target_linear", "lora_mlp_kernel")
    sharded = text + "fsdp_config: {fsdp_offload_params: true, fsdp_limit_all_gathers: true}\n"
    train = said(tmp_path, sharded)["train"]
    assert train["fsdp"] is True and train["fsdp_config"] == {"cpu_offload": True, "version": 1}
    assert "train.yaml:9: optimizer: does not go with FSDP2" in problem(tmp_path, sharded + "fsdp_version: 2\n")


def test_parameters_are_trained_that_are_named(tmp_path: Path) -> None:
    text = without(LORA, "adapter", "lora_r", "lora_alpha", "lora_target_linear", "lora_mlp_kernel")
    model = said(tmp_path, text + "unfrozen_parameters: [^lm_head.weight$, 'model.layers.2[0-9]+.mlp']\n")["model"]
    assert model["freeze_except"] == [r"^lm_head\.weight$", r"model\.layers\.2[0-9]+\.mlp"]
    assert model["enable_input_require_grads"] is True
    rows = problem(tmp_path, text + "unfrozen_parameters: ['^model.embed_tokens.weight$[:32000]']\n")
    assert "[:32000]: not simulated: some rows of a parameter" in rows
    assert "axolotl freezes the adapters, too" in problem(tmp_path, LORA + "unfrozen_parameters: [lm_head]\n")


def test_models_are_prepared_for_the_second_version_by_axolotl(tmp_path: Path) -> None:
    text = LORA.replace("adamw_bnb_8bit", "adamw_torch_8bit") + "fsdp_version: 2\n"
    found = said(
        tmp_path, text + "fsdp_config: {reshard_after_forward: true}\ndp_shard_size: 2\ndp_replicate_size: 4\n"
    )
    config = {"reshard_after_forward": True, "version": 2, "prepared_by": "axolotl"}
    assert found["train"]["fsdp_config"] == config
    assert found["parallel"] == {"gpus": 8, "dp_replicate_size": 4}
    four = text.replace("adapter: lora", "adapter: qlora\nload_in_4bit: true")
    rejected = problem(tmp_path, four + "fsdp_config: {cpu_ram_efficient_loading: true}\n")
    assert "fsdp_config: cpu_ram_efficient_loading does not go with load_in_4bit" in rejected
    pageable = problem(tmp_path, text + "fsdp_config: {offload_params: true, cpu_offload_pin_memory: false}\n")
    assert "cpu_offload_pin_memory: false: not simulated" in pageable


CUT = "plugins: [axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin]\n"


def test_cut_cross_entropy_is_switched_on_by_its_plugin(tmp_path: Path) -> None:
    assert said(tmp_path, LORA + CUT)["model"]["kernels"] == ["cut_cross_entropy"]
    assert "kernels" not in said(tmp_path, LORA + CUT + "cut_cross_entropy: false\n")["model"]
    assert "kernels" not in said(tmp_path, LORA + "cut_cross_entropy: true\n")["model"]


def test_with_cut_cross_entropy_no_weights_stay_in_float32(tmp_path: Path) -> None:
    text = without(LORA, "adapter", "lora_r", "lora_alpha", "lora_target_linear", "lora_mlp_kernel", "sample_packing")
    sdpa = text.replace("flash_attention_2", "sdpa")
    assert read(written(tmp_path, sdpa)).model.float32_parameters
    assert not read(written(tmp_path, sdpa + CUT)).model.float32_parameters


def test_axolotl_switches_on_its_kernels_for_adapters_by_itself(tmp_path: Path) -> None:
    text = without(LORA, "lora_mlp_kernel")
    workload = read(written(tmp_path, text))
    assert workload.model.kernels == ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")
    assert workload.origin is not None and any("switches on its kernels" in each for each in workload.origin.assumed)
    assert read(written(tmp_path, text + "lora_o_kernel: true\n")).model.kernels == ("lora_o_kernel",)


@pytest.mark.parametrize("line", ["trust_remote_code: true", "load_in_8bit: true", "lora_qkv_kernel: false"])
def test_kernels_that_axolotl_leaves_off(tmp_path: Path, line: str) -> None:
    assert not read(written(tmp_path, f"{without(LORA, 'lora_mlp_kernel')}{line}\n")).model.kernels


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("lora_o_kernel: true\nload_in_8bit: true", "lora_o_kernel: does not go with adapter: lora and load_in_8bit"),
        ("lora_o_kernel: true\ntrust_remote_code: true", "lora_o_kernel: does not go with trust_remote_code"),
        ("lora_o_kernel: true\nfsdp_config: {offload_params: false}", "lora_o_kernel: not simulated with FSDP"),
        (
            "peft_use_dora: true",
            "peft_use_dora: not simulated with axolotl's kernels for adapters: set lora_mlp_kernel",
        ),
        ("lora_target_modules: [q_proj, embed_tokens]", "lora_target_modules: embed_tokens: not simulated"),
    ],
)
def test_kernels_for_adapters_that_are_not_simulated(tmp_path: Path, lines: str, message: str) -> None:
    assert message in problem(tmp_path, f"{without(LORA, 'lora_mlp_kernel')}{lines}\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("lora_rr: 8", "/train.yaml:17: lora_rr: is no key of axolotl 0.18; did you mean lora_r"),
        ("rl: kto", "/train.yaml:17: rl: kto: not simulated: the trainer of axolotl"),
        ("rl: dpo", "sample_packing: not simulated with rl: dpo"),
        ("deepspeed: nowhere.json", "/train.yaml:17: deepspeed: no such file: nowhere.json"),
        ("lora_dropout: much", "/train.yaml:17: lora_dropout: must be a number"),
        ("sequence_len: long", "/train.yaml:17: sequence_len: must be a whole number above 0, found 'long'"),
        ("evals_per_epoch: often", "/train.yaml:17: evals_per_epoch: must be a number, found 'often'"),
        ("seed: ${SEED}", "/train.yaml:17: seed: is a template (${SEED})"),
        ("qat: {weight_dtype: int4}", "/train.yaml:17: qat: not simulated: training for quantised weights"),
        ("activation_offloading: true", "/train.yaml:17: activation_offloading: not simulated"),
        ("context_parallel_size: 2", "/train.yaml:17: context_parallel_size: not simulated: ring attention"),
        ("attn_implementation: xformers", "/train.yaml:17: attn_implementation: xformers: not simulated"),
        ("attn_implementation: sdpa", "sample_packing: with sdpa: not simulated: packs run PyTorch's varlen_attn"),
        ("optimizer: muon", "/train.yaml:17: optimizer: muon: not simulated"),
        ("gpu: h100", "gpu: is a key of a workload, and the file is a configuration of axolotl"),
        ("finetuning_type: lora", "finetuning_type: is no key of axolotl"),
        ("plugins: [axolotl.integrations.kd.KDPlugin]", "plugins: axolotl.integrations.kd.KDPlugin: not simulated"),
    ],
)
def test_what_is_wrong_or_not_simulated_is_named_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    key = line.partition(":")[0]
    text = without(LORA, key)
    removed = len(LORA.splitlines()) - len(text.splitlines())
    assert message.replace(":17:", f":{17 - removed}:") in problem(tmp_path, f"{text}{line}\n")


def test_keys_that_are_off_are_no_reason_to_refuse(tmp_path: Path) -> None:
    off = "relora: false\nfp8: null\ncontext_parallel_size: 1\ngptq: false\nwandb_project:\ntest_datasets:\nrl:\n"
    read(written(tmp_path, LORA + off))


def test_embeddings_and_norms_stay_in_float32_without_kernels_of_flash_attention(tmp_path: Path) -> None:
    full = without(LORA, "adapter", "lora_r", "lora_alpha", "lora_target_linear", "lora_mlp_kernel", "sample_packing")
    assert not read(written(tmp_path, full)).model.float32_parameters
    sdpa = full.replace("flash_attention_2", "sdpa")
    patterns = read(written(tmp_path, sdpa)).model.float32_parameters
    names = ["model.norm.weight", "lm_head.weight", "model.layers.0.post_attention_layernorm.weight"]
    names += ["model.embed_tokens.weight", "model.layers.0.mlp.gate.weight", "model.layers.0.mlp.gate_proj.weight"]
    kept = [name for name in names if any(re.match(pattern, name) for pattern in patterns)]
    assert kept == names[:-1]
    assert "not simulated with deepspeed: embeddings and norms" in problem(
        tmp_path, sdpa + "deepspeed: {zero_optimization: {stage: 2}}\n"
    )


def test_a_command_names_the_launcher_and_its_gpus(tmp_path: Path) -> None:
    file = written(tmp_path, LORA)
    assert read(f"CUDA_VISIBLE_DEVICES=0,1 axolotl train {file} --micro-batch-size 1").parallel.gpus == 2
    workload = read(f"accelerate launch --num_processes 4 -m axolotl.cli.train {file}")
    assert (workload.parallel.gpus, workload.allocator) == (4, "")
    assert read(f"PYTORCH_ALLOC_CONF=max_split_size_mb:64 axolotl train {file}").allocator == "max_split_size_mb:64"
    assert read(f"axolotl train {file} --launcher torchrun -- --nproc_per_node=2").parallel.gpus == 2
    with pytest.raises(WorkloadError, match="axolotl train: --fast: is no key of axolotl"):
        read(f"axolotl train {file} --fast")
    with pytest.raises(WorkloadError, match=r"nowhere.yml: cannot be read: No such file"):
        read("axolotl train nowhere.yml")


PAIRS = without(LORA, "sample_packing", "lora_mlp_kernel")


@pytest.mark.parametrize(
    ("lines", "loss", "alpha"),
    [
        ("rl: dpo\n", "sigmoid", 0.0),
        ("rl: dpo\ndpo_loss_type: [hinge]\nrl_beta: 0.2\n", "hinge", 0.0),
        ("rl: ipo\n", "ipo", 0.0),
        ("rl: orpo\norpo_alpha: 0.1\n", "orpo", 0.0),
        ("rl: simpo\nsimpo_gamma: 0.5\n", "simpo", 1.0),
        ("rl: simpo\ncpo_alpha: 0.0\n", "simpo", 0.0),
    ],
)
def test_pairs_of_answers_are_trained_by_the_step_of_its_trainers(
    tmp_path: Path, lines: str, loss: str, alpha: float
) -> None:
    workload = read(written(tmp_path, PAIRS + lines))
    spec = workload.preference
    assert (workload.loop, spec.trainer, spec.loss_type, spec.rpo_alpha) == ("preference", "axolotl", loss, alpha)
    assert (workload.data.sequence_length, workload.model.kernels) == (2000, ())  # neither rounded nor fused
    assert workload.train.include_num_input_tokens_seen == "no"


def test_adapters_over_four_bits_are_trained_in_bfloat16_by_trl_alone(tmp_path: Path) -> None:
    quantised = PAIRS.replace("adapter: lora", "adapter: qlora") + "load_in_4bit: true\n"
    assert read(written(tmp_path, quantised + "rl: dpo\n")).model.trainable_dtype == "bfloat16"
    assert read(written(tmp_path, quantised + "rl: orpo\n")).model.trainable_dtype is None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (
            "dpo_loss_type: [sigmoid, sft]",
            "dpo_loss_type: sigmoid, sft: not simulated; sigmoid, hinge or ipo alone are",
        ),
        ("precompute_ref_log_probs: true", "precompute_ref_log_probs: not simulated: another step of TRL's trainer"),
        ("pad_to_multiple_of: 64", "pad_to_multiple_of: not simulated with rl: dpo"),
        ("lora_o_kernel: true", "lora_o_kernel: not simulated with rl: dpo"),
    ],
)
def test_other_steps_of_pairs_are_refused_by_name(tmp_path: Path, lines: str, message: str) -> None:
    assert message in problem(tmp_path, f"{PAIRS}rl: dpo\n{lines}\n")


MIXTURE = """\
base_model: mistralai/Mixtral-8x7B-v0.1
adapter: qlora
load_in_4bit: true
lora_r: 8
lora_alpha: 16
lora_target_modules: [q_proj]
quantize_moe_experts: true
attn_implementation: flash_attention_2
"""


def test_experts_are_quantised_as_they_are_loaded_and_routers_stay_in_float32(tmp_path: Path) -> None:
    model = read(written(tmp_path, MIXTURE)).model
    assert model.quantization is not None and model.quantization.bnb_4bit_experts
    assert [
        bool(re.match(model.float32_parameters[0], f"model.mlp.{name}.weight")) for name in ("gate", "gate_up")
    ] == [
        True,
        False,
    ]
    dense = MIXTURE.replace("mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen2.5-0.5B")
    assert not read(written(tmp_path, without(dense, "quantize_moe_experts"))).model.float32_parameters


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("load_in_4bit", "load_in_8bit", "quantize_moe_experts: not simulated in 8 bits"),
        ("lora_r", "lora_target_linear: true\nlora_r", "quantize_moe_experts: does not go with lora_target_linear"),
        ("lora_r", "lora_target_parameters: [experts.down_proj]\nlora_r", "not simulated with lora_target_parameters"),
        ("lora_r", "fsdp_config: {offload_params: false}\nlora_r", "quantize_moe_experts: not simulated with FSDP"),
    ],
)
def test_experts_that_are_quantised_otherwise_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = MIXTURE.replace(old, new)
    assert message in problem(tmp_path, text.replace("adapter: qlora", "adapter: lora") if "8bit" in new else text)
