"""Scripts that shard their model themselves, and start without a launcher."""

from __future__ import annotations

import pytest
from script_types import RunScript

from trainatomy.results.prediction import Plan
from trainatomy.scripts.command import read_command, variables

SHARDED = """
    import os
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cuda")
    for layer in model:
        layer.reset_parameters()
        nn.init.normal_(layer.weight)
    noise = torch.randn_like(model[0].weight)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(5):
        model(torch.randn(8, 1024, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_sharded_weights_are_filled_with_random_numbers(run_script: RunScript) -> None:
    outcome = run_script(SHARDED, gpus=4)
    assert outcome.prediction is not None and outcome.prediction.script is not None, outcome.message
    run = outcome.prediction.script
    assert run.models[0].parameters == 4 * 1024 * 1024
    assert run.models[0].bytes == 4 * 1024 * 1024  # a quarter of four bytes for each parameter
    assert run.optimizers[0].state_bytes == 2 * run.models[0].bytes


EXCHANGED = """
    import torch
    import torch.distributed as dist
    from torch import nn

    dist.init_process_group("nccl")
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        size = torch.tensor([[4, 64]], device="cuda")
        joined = torch.empty(4, 2, dtype=torch.long, device="cuda")
        dist.all_gather_into_tensor(joined, size)
        parts = [torch.empty_like(size) for _ in range(4)]
        dist.all_gather(parts, size)
        assert max(row[0] for row in joined) == 4 and all(part[0, 1] == 64 for part in parts)
        longest, count = size[0, 0].clone(), size[0, 0].clone()
        dist.all_reduce(longest, op=dist.ReduceOp.MAX)
        dist.all_reduce(count)
        assert longest == 4 and count.item() == 16
        found = [None] * 4
        dist.all_gather_object(found, {"samples": 4})
        assert found[3] == {"samples": 4}
        token = torch.randn(4, device="cuda").argmax()
        dist.all_reduce(token)
        assert token != 7
        model(torch.randn(4, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_numbers_that_ranks_send_each_other_are_known(run_script: RunScript) -> None:
    outcome = run_script(EXCHANGED, gpus=4)
    assert outcome.prediction is not None, outcome.message
    assert not any("equal: they are assumed to differ" in note for note in outcome.prediction.notes)


ALONE = """
    import os
    import torch
    import torch.distributed as dist
    from torch import nn

    {before}
    dist.init_process_group({arguments})
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64).cuda(), device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        model(torch.randn(4, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.all_reduce(torch.ones(1, device="cuda"))
    dist.destroy_process_group()
"""
"""A process that makes itself a group of one."""
_SET = "os.environ.update(RANK='0', WORLD_SIZE='1', LOCAL_RANK='0', MASTER_ADDR='localhost', MASTER_PORT='29501')"


@pytest.mark.parametrize(
    ("before", "arguments"),
    [
        (_SET, "'nccl'"),
        (_SET, ""),
        ("", "'cpu:gloo,cuda:nccl', 'tcp://localhost:29501', world_size=1, rank=0"),
    ],
)
def test_a_group_of_one_is_that_of_torchruns_only_process(run_script: RunScript, before: str, arguments: str) -> None:
    text = ALONE.format(before=before, arguments=arguments)
    handover = run_script(text).handover
    assert handover is not None and handover.words == ("torchrun", "--nproc-per-node=1", "train.py")
    assert not handover.variables  # the script sets its own again
    outcome = run_script(text, before=handover.words[:2])
    assert outcome.prediction is not None, outcome.message
    buffers = outcome.prediction.memory.components["communication_buffers"]
    assert buffers > 0


@pytest.mark.parametrize(("options", "is_sharded"), [((), False), (("--use_fsdp", "--fsdp_version=2"), True)])
def test_accelerate_shards_a_process_that_is_alone_where_fsdp_is_asked_for(
    run_script: RunScript, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], is_sharded: bool
) -> None:
    before = ("accelerate", "launch", *options, "--num_processes=1")
    for name, value in variables(read_command([*before, "train.py"])).items():
        monkeypatch.setenv(name, value)
    text = """
    import torch
    from accelerate import Accelerator
    from torch.distributed.tensor import DTensor
    accelerator = Accelerator()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    for _ in range(3):
        accelerator.backward(model(torch.randn(4, 64, device="cuda")).sum())
        optimizer.step()
        optimizer.zero_grad()
    assert isinstance(next(model.parameters()), DTensor) == IS_SHARDED
    """
    outcome = run_script(text.replace("IS_SHARDED", str(is_sharded)), before=before)
    assert outcome.message == "" and outcome.prediction is not None


def test_debug_shows_where_an_exception_came_from(run_script: RunScript, capfd: pytest.CaptureFixture[str]) -> None:
    text = "def wrong():\n    raise ValueError('no such width')\nwrong()\n"
    assert "no such width" in run_script(text).message and "Traceback" not in capfd.readouterr().err
    assert "no such width" in run_script(text, debug=True).message
    assert "in wrong" in capfd.readouterr().err


def test_a_script_that_needs_a_launcher_says_how_to_name_it(run_script: RunScript) -> None:
    outcome = run_script("import torch.distributed as dist\ndist.init_process_group('nccl')\n")
    assert "trainatomy run --gpus N" in outcome.message and "torchrun" in outcome.message


@pytest.mark.parametrize("is_mixed", [False, True])
def test_fsdp1_shards_a_model_with_buffers(run_script: RunScript, is_mixed: bool) -> None:
    precision = "MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16)" if is_mixed else None
    outcome = run_script(
        f"""
        import torch
        from torch import nn
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

        torch.distributed.init_process_group("nccl")
        model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.BatchNorm1d(1024, affine=False))
        model = FullyShardedDataParallel(model, device_id=0, mixed_precision={precision}, use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(5):
            model(torch.randn(8, 1024).cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            states = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        """,
        gpus=4,
    )
    assert outcome.prediction is not None and outcome.prediction.script is not None, outcome.message
    assert outcome.prediction.script.models[0].bytes == 1024 * 1024


def test_shards_may_lie_in_host_memory_between_their_uses(run_script: RunScript) -> None:
    text = SHARDED.replace("fully_shard(layer)", "fully_shard(layer, offload_policy=CPUOffloadPolicy())")
    text = text.replace("fully_shard(model)", "fully_shard(model, offload_policy=CPUOffloadPolicy())")
    text = text.replace("import fully_shard", "import CPUOffloadPolicy, fully_shard")
    text = text.replace('    model.to_empty(device="cuda")\n', "").replace(
        'torch.device("meta")', 'torch.device("cpu")'
    )
    outcome = run_script(text, gpus=4)
    assert outcome.prediction is not None and outcome.prediction.script is not None, outcome.message
    assert outcome.prediction.script.models[0].bytes == 0
    assert Plan.of(outcome.prediction.workload).strategy == "fsdp2"


ZERO_3 = """
    import deepspeed
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config
    from transformers.integrations import HfDeepSpeedConfig

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
        "optimizer": {"type": "AdamW"},
    }
    kept = HfDeepSpeedConfig(settings)
    config = GPT2Config(n_layer=2, n_embd=64, n_head=2, vocab_size=1000, bos_token_id=1, eos_token_id=2)
    model = AutoModelForCausalLM.from_pretrained("openai-community/gpt2", config=config)
    engine = deepspeed.initialize(model=model, config=settings, model_parameters=model.parameters())[0]
    for _ in range(5):
        ids = torch.randint(0, 1000, (1, 128), device="cuda")
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
"""


def test_zero_3_partitions_the_weights_that_a_script_loads(run_script: RunScript) -> None:
    pytest.importorskip("deepspeed")
    outcome = run_script(ZERO_3, gpus=2)
    assert outcome.prediction is not None and outcome.prediction.script is not None, outcome.message
    model, optimizer = outcome.prediction.script.models[0], outcome.prediction.script.optimizers[0]
    assert model.name == "GPT2LMHeadModel" and model.bytes == pytest.approx(model.parameters * 2 / 2, rel=0.02)
    assert optimizer.state_bytes == pytest.approx(model.parameters * 8 / 2, rel=0.02)
    assert Plan.of(outcome.prediction.workload).strategy == "deepspeed3"
