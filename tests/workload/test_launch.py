"""Launchers' files and commands as settings of a workload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trainatomy.errors import WorkloadError
from trainatomy.workload.launch import read_launch
from trainatomy.workload.overrides import merge

FSDP2: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "FSDP",
    "mixed_precision": "bf16",
    "num_machines": 2,
    "num_processes": 16,
    "fsdp_config": {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "BertLayer",
        "fsdp_offload_params": False,
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    },
}


def written(folder: Path, **changes: Any) -> str:
    path = folder / "accelerate.yaml"
    path.write_text(yaml.safe_dump({**FSDP2, **changes}))
    return str(path)


def test_an_accelerate_configuration_is_read_as_it_is(tmp_path: Path) -> None:
    workload = merge(None, {"model": "bert-base-uncased", "gpu": "h200", "launch": written(tmp_path)})
    assert (workload.parallel.gpus, workload.parallel.nodes, workload.train.bf16) == (8, 2, True)
    assert workload.train.fsdp is True
    assert workload.train.fsdp_config is not None
    assert workload.train.fsdp_config["version"] == 2
    assert workload.train.fsdp_config["transformer_layer_cls_to_wrap"] == ["BertLayer"]


def test_a_plain_loop_gets_pytorchs_own_options(tmp_path: Path) -> None:
    changed = {**FSDP2["fsdp_config"], "fsdp_offload_params": True, "fsdp_reshard_after_forward": False}
    flags = {"model": "bert-base-uncased", "loop": "pytorch", "launch": written(tmp_path, fsdp_config=changed)}
    parallel = merge(None, flags).parallel
    assert (parallel.strategy, parallel.offload_policy, parallel.reshard_after_forward) == ("fsdp2", "cpu", False)
    assert parallel.mp_policy is not None
    assert parallel.mp_policy.param_dtype == "bfloat16"


def test_a_plain_loop_wraps_the_classes_that_the_launcher_names(tmp_path: Path) -> None:
    flags = {"model": "bert-base-uncased", "loop": "pytorch", "launch": written(tmp_path)}
    assert merge(None, flags).parallel.transformer_layer_cls_to_wrap == ("BertLayer",)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("limit_all_gathers", False, "fsdp_limit_all_gathers: false: is simulated with loop: trainer"),
        ("activation_checkpointing_offload", True, "fsdp_activation_checkpointing_offload: true: is not simulated"),
        ("param_init_fn", "mine", "fsdp_param_init_fn: not known to loop: pytorch"),
    ],
)
def test_no_setting_of_fsdp_is_lost_in_a_plain_loop(tmp_path: Path, key: str, value: Any, message: str) -> None:
    changed = {**FSDP2["fsdp_config"], f"fsdp_{key}": value}
    flags = {"model": "bert-base-uncased", "loop": "pytorch", "launch": written(tmp_path, fsdp_config=changed)}
    with pytest.raises(WorkloadError, match=message):
        merge(None, flags)


def test_flags_override_the_launcher(tmp_path: Path) -> None:
    flags = {"model": "bert-base-uncased", "gpus": 4, "fp16": True, "launch": written(tmp_path)}
    workload = merge(None, flags)
    assert (workload.parallel.gpus, workload.train.fp16, workload.train.bf16) == (4, True, False)


@pytest.mark.parametrize(
    ("command", "gpus", "nodes"),
    [
        ("torchrun --nproc-per-node 8 train.py --nnodes 3", 8, 1),
        ("torchrun --nproc_per_node=4 --nnodes=2 --standalone train.py", 4, 2),
        ("NCCL_DEBUG=INFO python -m torch.distributed.run --nnodes 1:3 --nproc-per-node 2 t.py", 2, 3),
        ("accelerate launch --multi_gpu --num_processes 8 --num_machines 2 train.py --bf16", 4, 2),
        ("accelerate launch --num_processes 2 train.py", 2, 1),
        ("accelerate launch --same_network --quiet --num_processes 2 train.py --num_processes 4", 2, 1),
    ],
)
def test_a_command_line_is_read_up_to_the_script(command: str, gpus: int, nodes: int) -> None:
    launch = read_launch(command)
    assert (launch.gpus, launch.nodes) == (gpus, nodes)


def test_a_shell_script_with_the_command_is_read(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/sh\n# accelerate launch is not used\ntorchrun \\\n  --nproc-per-node 2 \\\n  train.py\n")
    assert read_launch(str(script)).gpus == 2


def test_options_of_accelerate_override_its_file(tmp_path: Path) -> None:
    launch = read_launch(f"accelerate launch --config_file {written(tmp_path)} --num_processes 4 --fsdp_version 1 t.py")
    assert (launch.gpus, launch.nodes) == (2, 2)
    assert launch.fsdp is not None
    assert launch.fsdp["version"] == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_processes": 15}, "num_processes 15 is no multiple of num_machines 2"),
        ({"distributed_type": "NO"}, "distributed_type is NO, but num_processes is 16"),
        ({"distributed_type": "MEGATRON_LM"}, "MEGATRON_LM is not simulated"),
        ({"mixed_precision": "fp8"}, "mixed_precision: fp8 is not simulated"),
        ({"gpu_ids": "0,1"}, "gpu_ids names 0,1, fewer GPUs than num_processes 16"),
        ({"use_cpu": True}, "use_cpu"),
        ({"num_proceses": 4}, "num_proceses: not a key of accelerate's configuration.*num_processes"),
        ({"dynamo_backend": "CUDAGRAPHS"}, "dynamo_backend: CUDAGRAPHS is not simulated; INDUCTOR is"),
        ({"dynamo_config": {"dynamo_backend": "IPEX"}}, "dynamo_backend: IPEX is not simulated; INDUCTOR is"),
        ({"dynamo_config": {"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune"}}, "dynamo_mode: MAX-AUTOTUNE"),
        ({"distributed_type": "MULTI_GPU", "parallelism_config": {"parallelism_config_dp_shard_size": 8}}, "MULTI_GPU"),
    ],
)
def test_contradictions_and_what_is_not_simulated_are_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(WorkloadError, match=message):
        read_launch(written(tmp_path, **changes))


def test_accelerates_compiler_is_that_of_a_workload() -> None:
    launch = read_launch("accelerate launch --dynamo_backend inductor --dynamo_use_fullgraph train.py")
    assert launch.settings("trainer")["train", "torch_compile"] is True
    assert ("train", "torch_compile") not in read_launch("accelerate launch train.py").settings("trainer")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--dynamo_backend cudagraphs", "dynamo_backend: CUDAGRAPHS is not simulated; INDUCTOR is"),
        ("--dynamo_backend inductor --dynamo_use_dynamic", "dynamo_use_dynamic: TRUE is not simulated; FALSE is"),
        ("--cpu", "use_cpu"),
        ("--use_megatron_lm", "MEGATRON_LM is not simulated"),
        ("--tpu", "XLA is not simulated"),
        ("--use_fsdp --parallelism_config_sp_size 2", "sp_size is not simulated"),
        ("--use_fsdp --parallelism_config_cp_comm_strategy alltoall", "set parallel.cp_comm_strategy"),
    ],
)
def test_options_of_accelerate_that_are_not_simulated_are_named(options: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        read_launch(f"accelerate launch {options} --num_processes 2 train.py")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("activation_checkpointing", True),
        ("auto_wrap_policy", "SIZE_BASED_WRAP"),
        ("forward_prefetch", True),
        ("use_orig_params", False),
        ("sharding_strategy", "HYBRID_SHARD"),
        ("sharding_strategy", "NO_SHARD"),
    ],
)
def test_a_plain_loop_refuses_what_only_the_trainer_does(tmp_path: Path, name: str, value: Any) -> None:
    file = written(tmp_path, fsdp_config={"fsdp_version": 1, f"fsdp_{name}": value})
    with pytest.raises(WorkloadError, match="loop: "):
        merge(None, {"model": "bert-base-uncased", "loop": "pytorch", "launch": file})
    assert merge(None, {"model": "bert-base-uncased", "launch": file}).train.fsdp is True


def test_the_strategy_of_fsdp1_is_that_of_the_variable_which_accelerate_launch_sets(tmp_path: Path) -> None:
    file = written(tmp_path, fsdp_config={"fsdp_version": 1, "fsdp_sharding_strategy": "SHARD_GRAD_OP"})
    config = merge(None, {"model": "bert-base-uncased", "launch": file}).train.fsdp_config
    assert config is not None
    assert config["sharding_strategy"] == "SHARD_GRAD_OP"


@pytest.mark.parametrize("text", ["nothing", "python train.py", "torchrun --nproc-per-node gpu train.py"])
def test_what_is_no_launch_is_said(text: str) -> None:
    with pytest.raises(WorkloadError, match="--launch"):
        read_launch(text)


DEEPSPEED: dict[str, Any] = {
    "distributed_type": "DEEPSPEED",
    "fsdp_config": {},
    "deepspeed_config": {
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "none",
        "zero3_init_flag": False,
        "zero_stage": 2,
    },
}


def test_accelerates_own_settings_of_deepspeed_become_its_configuration(tmp_path: Path) -> None:
    flags = {"model": "gpt2", "gradient_accumulation_steps": 4, "launch": written(tmp_path, **DEEPSPEED)}
    workload = merge(None, flags)
    assert (workload.parallel.gpus, workload.parallel.nodes, workload.train.bf16) == (8, 2, True)
    config = workload.train.deepspeed
    assert config is not None
    assert config["zero_optimization"] == {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    assert (config["gradient_accumulation_steps"], config["gradient_clipping"]) == (4, 1.0)
    assert config["bf16"] == {"enabled": True}


@pytest.mark.parametrize(
    ("command", "gpus", "nodes"),
    [
        ("deepspeed --num_gpus 4 train.py --deepspeed FILE --num_gpus 8", 4, 1),
        ("deepspeed --num_gpus=8 --num_nodes 2 --no_ssh_check train.py --deepspeed=FILE", 8, 2),
        ("deepspeed --include host1:0,1@host2:0,1 --module train --deepspeed FILE", 2, 2),
        ("torchrun --nproc-per-node 2 train.py --deepspeed FILE", 2, 1),
        ("accelerate launch --use_deepspeed --num_processes 2 --deepspeed_config_file FILE train.py", 2, 1),
    ],
)
def test_commands_name_deepspeeds_file(tmp_path: Path, command: str, gpus: int, nodes: int) -> None:
    file = tmp_path / "zero.json"
    file.write_text('{"zero_optimization": {"stage": 3}}')
    launch = read_launch(command.replace("FILE", str(file)))
    assert (launch.gpus, launch.nodes) == (gpus, nodes)
    assert launch.deepspeed == {"zero_optimization": {"stage": 3}}


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("deepspeed train.py", "deepspeed --num_gpus is 'all': give a number"),
        ("deepspeed --num_gpus 2 train.py --deepspeed gone.json", "cannot read gone.json"),
        ("deepspeed --include host1:0,1@host2:0 train.py", "machines with different numbers of GPUs"),
    ],
)
def test_mistakes_in_commands_of_deepspeed_are_named(command: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        read_launch(command)


@pytest.mark.parametrize("loop", ["sft", "dpo", "kto", "reward"])
def test_trainers_of_trl_take_what_launchers_say(tmp_path: Path, loop: str) -> None:
    prompt = {"prompt_length": 8} if loop in ("dpo", "kto") else {}
    flags = {"model": "gpt2", "loop": loop, **prompt, "launch": written(tmp_path, **DEEPSPEED)}
    workload = merge(None, flags)
    assert workload.train.deepspeed is not None
    assert workload.parallel.gpus > 1


def test_a_plain_loop_has_no_deepspeed(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="DeepSpeed is simulated with loop: trainer and those of TRL only"):
        merge(None, {"model": "gpt2", "loop": "pytorch", "launch": written(tmp_path, **DEEPSPEED)})


def test_an_unknown_key_of_deepspeed_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="deepspeed_config: unknown key zero_stag"):
        read_launch(written(tmp_path, **{**DEEPSPEED, "deepspeed_config": {"zero_stag": 2}}))
