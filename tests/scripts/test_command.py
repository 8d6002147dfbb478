"""Commands as they are typed: scripts, modules, launchers."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_types import RunScript

from trainatomy.errors import WorkloadError
from trainatomy.scripts.command import read_command

DISTRIBUTED = """
import os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("nccl")
assert dist.get_world_size() == 4 and int(os.environ["WORLD_SIZE"]) == 4
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = DistributedDataParallel(torch.nn.Linear(64, 64).cuda(), device_ids=[0])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(5):
    model(torch.ones(4, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
"""


def test_a_script_and_its_arguments() -> None:
    command = read_command(["train.py", "--gpu", "0", "-m"])
    assert (command.target, command.arguments, command.launch) == ("train.py", ("--gpu", "0", "-m"), None)
    assert read_command(["python", "-u", "train.py"]).target == "train.py"


def test_a_module() -> None:
    command = read_command(["-m", "json.tool", "x"])
    assert (command.is_module, command.target, command.arguments) == (True, "json.tool", ("x",))
    assert command.file().name == "tool.py"


@pytest.mark.parametrize(
    "words",
    [
        "torchrun --nproc_per_node 4 --standalone train.py --lr 1",
        "torchrun --nproc-per-node=4 train.py --lr 1",
        "accelerate launch --num_processes 4 --multi_gpu train.py --lr 1",
    ],
)
def test_launchers(words: str) -> None:
    command = read_command(words.split())
    assert (command.target, command.arguments) == ("train.py", ("--lr", "1"))
    assert command.launch is not None
    assert command.launch.gpus == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.py"], "no such file: missing.py"),
        (["."], "is a folder"),
        (["-m", "no.such.module"], "there is no module no"),
        (["work.yaml"], "is a workload file"),
    ],
)
def test_what_cannot_be_run(words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("work.yaml").touch()
    with pytest.raises(WorkloadError, match=message):
        read_command(words).file()


def test_one_rank_of_several_is_simulated(run_script: RunScript) -> None:
    found = run_script(DISTRIBUTED, gpus=4)
    assert found.message == ""
    assert found.prediction is not None
    assert found.prediction.workload["parallel"] == {"gpus": 4}
    assert found.prediction.memory.components["nccl"] > 0
    assert found.prediction.time is not None
    assert found.prediction.time.communication is not None
