"""How scripts end: after their steps, by themselves, and by errors that name the script's line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from script_types import RunScript

from trainatomy.errors import FactoryError, MissingLibrary, SimulationError, WorkloadError
from trainatomy.reporters.script_sentences import ending, not_reached, script_sentences
from trainatomy.scripts.command import read_command
from trainatomy.scripts.job import Job
from trainatomy.scripts.run import run_job

LOOP = """
import torch
from torch import nn

def train(model, optimizer, steps):
    for step in range(steps):
        loss = model(torch.randn(8, 16, device="cuda")).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

"""
MODEL = "model = nn.Linear(16, 16)\noptimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)\nmodel.cuda()\n"


def test_a_script_is_stopped_after_its_steps(run_script: RunScript) -> None:
    found = run_script(LOOP + MODEL + "train(model, optimizer, 1000)\n", steps=2).prediction
    assert found is not None
    assert found.script is not None
    assert (found.script.ending, found.script.steps) == ("steps", 2)
    assert [(one.name, one.parameters) for one in found.script.models] == [("Linear", 272)]
    assert [(one.name, one.steps, one.state_bytes) for one in found.script.optimizers] == [("SGD", 2, 1088)]
    assert found.memory.components.weights == found.memory.components.optimizer_states == 1024 + 512


def test_an_optimizer_made_before_the_move_updates_what_moved(run_script: RunScript) -> None:
    found = run_script(LOOP + MODEL + "train(model, optimizer, 5)\n").prediction
    assert found is not None
    assert found.memory.components.optimizer_states == found.memory.components.weights
    assert found.memory.components.gradients >= 1024


def test_a_script_that_ends_early_keeps_what_ran(run_script: RunScript) -> None:
    found = run_script(LOOP + MODEL + "train(model, optimizer, 1)\n")
    assert found.exit_code == 0
    assert found.prediction is not None
    assert found.prediction.script is not None
    assert (found.prediction.script.ending, found.prediction.script.steps) == ("finished", 1)


def test_a_failure_keeps_what_ran_and_names_the_line(run_script: RunScript) -> None:
    found = run_script(LOOP + MODEL + "train(model, optimizer, 1)\n{}['missing']\n")
    assert found.exit_code == FactoryError.exit_code
    assert "train.py:16 raised KeyError: 'missing'" in found.message
    assert found.prediction is not None
    assert found.prediction.script is not None
    assert found.prediction.script.ending == "error"
    assert not_reached(found.prediction.script) == "whatever follows step 1, after which it failed"


@pytest.mark.parametrize(
    ("text", "handles"),
    [
        ("try: train(model, optimizer, 5)\nexcept torch.cuda.OutOfMemoryError: train(model, optimizer, 9)\n", True),
        ("train(model, optimizer, 5)\n", False),
    ],
)
@pytest.mark.parametrize("fits", [True, False])
def test_a_script_that_handles_errors_of_memory_is_told(
    run_script: RunScript, text: str, handles: bool, fits: bool
) -> None:
    loop = LOOP if fits else LOOP.replace("torch.randn(8, 16", "torch.randn(10**9, 16")
    found = run_script(loop + MODEL + text).prediction
    assert found is not None and found.script is not None and found.fits is fits
    noted = [one.name for one in found.script.stand_ins if one.kind == "out of memory"]
    assert noted == (["OutOfMemoryError"] if handles and not fits else [])


@pytest.mark.parametrize(
    ("text", "message", "error"),
    [
        ("print(1)\n", "train.py ended without training", WorkloadError),
        (
            "import nothing_of_that_name\n",
            "train.py:1 needs nothing_of_that_name, which is not installed",
            MissingLibrary,
        ),
        (
            "try:\n    import nothing_of_that_name\nexcept ImportError as error:\n"
            "    raise ModuleNotFoundError('Could not import module') from error\n",
            "train.py:4 needs nothing_of_that_name, which is not installed",
            MissingLibrary,
        ),
        ("\nname = input('name? ')\n", "train.py:2 asks for input (name?)", SimulationError),
        ("import getpass\ngetpass.getpass('token ')\n", "train.py:2 asks for input (token)", SimulationError),
        ("import sys\nfor line in sys.stdin: pass\n", "train.py:2 reads its standard input", SimulationError),
        (
            "import subprocess, sys\nsubprocess.run([sys.executable, 'other.py'])\n",
            "train.py:2 starts another process",
            SimulationError,
        ),
        ("import os\nos.execv('/bin/true', ['true'])\n", "train.py:2 starts another process", SimulationError),
        (
            "import torch\nweight = torch.ones(3, requires_grad=True)\noptimizer = torch.optim.SGD([weight], 0.1)\n"
            "weight.sum().backward()\noptimizer.step()\n",
            "train.py:5: SGD updates tensors on the CPU, none on the GPU",
            SimulationError,
        ),
        (
            "import torch\nx = torch.randn(3, device='cuda')\ny = torch.bincount((x > 0).long())\n",
            "train.py:3: aten::bincount in the training loop cannot be executed without data",
            SimulationError,
        ),
        ("import sys\nsys.exit(3)\n", "called sys.exit at train.py:2 before its first step: 3", FactoryError),
        ("import os\nos._exit(3)\n", "called sys.exit at train.py:2 before its first step: 3", FactoryError),
        ("import os\nos.fork()\n", "train.py:2 starts another process", SimulationError),
        (
            "import torch\ntorch.nn.Linear(2, 2)(torch.ones(1, 2))\n",
            "train.py:2: Linear is trained on the CPU",
            SimulationError,
        ),
        (
            "from torch.utils.cpp_extension import load\nload('mine', ['mine.cu'])\n",
            "train.py:2 compiles an extension of its own (mine)",
            SimulationError,
        ),
        (
            "import urllib.request\nurllib.request.urlopen('http://example.com')\n",
            "the network is off in a dry run",
            WorkloadError,
        ),
        (
            "import torch\nmodel = torch.nn.Linear(2, 2).cuda()\n"
            "torch.optim.LBFGS(model.parameters()).step(lambda: model(torch.ones(1, 2).cuda()).sum().backward())\n",
            "train.py:3: LBFGS decides by the values of gradients",
            SimulationError,
        ),
        (
            "import torch\nlibrary = torch.library.Library('extension_of_a_test', 'DEF')\n"
            "library.define('f(Tensor x) -> Tensor')\nlibrary.impl('f', lambda x: x, 'CUDA')\n"
            "torch.ops.extension_of_a_test.f(torch.ones(3, device='cuda'))\n",
            "train.py:5: extension_of_a_test::f in the training loop cannot be executed without data: its extension "
            "registers no kernel for meta tensors",
            SimulationError,
        ),
        ("import torch\ntorch.ones(3, device='cuda').long().nonzero()\nx = (\n", "SyntaxError", FactoryError),
    ],
)
def test_bad_scripts_are_explained(run_script: RunScript, text: str, message: str, error: type[WorkloadError]) -> None:
    found = run_script(text)
    assert found.prediction is None
    assert message in found.message
    assert found.exit_code == error.exit_code


def test_writes_go_nowhere_and_are_listed(run_script: RunScript, tmp_path: Path) -> None:
    text = """
import os, torch
os.makedirs("out/deep", exist_ok=True)
with open("out/deep/log.txt", "w") as file:
    file.write("hello")
assert open("out/deep/log.txt").read() == "hello" and os.listdir("out") == ["deep"]
torch.save({"a": torch.ones(2)}, "model.pt")
os.remove("keep.txt")
"""
    (tmp_path / "keep.txt").write_text("mine")
    found = run_script(text + LOOP + MODEL + "train(model, optimizer, 5)\n").prediction
    assert found is not None
    assert found.script is not None
    assert sorted(Path(one).name for one in found.script.writes) == ["keep.txt", "log.txt", "model.pt"]
    assert sorted(one.name for one in tmp_path.iterdir()) == ["keep.txt", "train.py"]
    assert (tmp_path / "keep.txt").read_text() == "mine"


def test_commands_are_left_out_and_listed(run_script: RunScript, tmp_path: Path) -> None:
    text = """
import os, subprocess
assert subprocess.run("touch made", shell=True).returncode == 0
assert subprocess.check_output(["git", "pull", "origin"], text=True, cwd="/nowhere") == ""
assert os.system("touch made") == 0 and os.popen("svn update").read() == ""
"""
    found = run_script(text + LOOP + MODEL + "train(model, optimizer, 5)\n")
    assert found.message == ""
    assert found.prediction is not None and found.prediction.script is not None
    noted = [(one.name, one.place) for one in found.prediction.script.stand_ins if one.kind == "command"]
    assert noted == [("touch made", "train.py:3"), ("git pull origin", "train.py:4"), ("svn update", "train.py:5")]
    assert not (tmp_path / "made").exists()


def test_a_loop_without_an_optimizer_says_so(run_script: RunScript) -> None:
    text = LOOP.replace("        optimizer.step()\n        optimizer.zero_grad()\n", "")
    found = run_script(text + "train(nn.Linear(16, 16).cuda(), None, 2)\n").prediction
    assert found is not None and found.script is not None
    said = script_sentences(found.script)
    assert said[0] == "`train.py` ended by itself after 2 steps"
    assert any(one.startswith("no optimizer stepped") for one in said)
    assert found.subject is not None and found.subject.optimizer is None


def test_values_that_decide_are_noted_with_their_line(run_script: RunScript) -> None:
    text = LOOP + MODEL + "train(model, optimizer, 1)\nif model.weight.sum() < 3:\n    train(model, optimizer, 5)\n"
    found = run_script(text).prediction
    assert found is not None
    assert found.script is not None
    assert [(one.kind, one.name, one.place) for one in found.script.stand_ins] == [
        ("computed values", "bools", "train.py:16")
    ]


def test_two_optimizers_make_one_step(run_script: RunScript) -> None:
    text = """
import torch
from torch import nn
one, other = nn.Linear(8, 8).cuda(), nn.Linear(8, 8).cuda()
first, second = torch.optim.Adam(one.parameters()), torch.optim.SGD(other.parameters())
for step in range(10):
    first.zero_grad()
    one(torch.ones(4, 8, device="cuda")).sum().backward()
    first.step()
    second.zero_grad()
    other(one(torch.ones(4, 8, device="cuda"))).sum().backward()
    second.step()
"""
    found = run_script(text).prediction
    assert found is not None
    assert found.script is not None
    assert [one.steps for one in found.script.optimizers] == [3, 3]
    assert len(found.script.models) == 2
    assert found.subject is not None and found.subject.optimizer == "Adam + SGD"


def test_the_time_limit_ends_a_script(run_script: RunScript) -> None:
    text = LOOP + MODEL + "train(model, optimizer, 1)\nimport time\ntime.sleep(20)\n"
    found = run_script(text, time_limit=1.0).prediction
    assert found is not None
    assert found.script is not None
    assert (found.script.ending, found.script.place) == ("time limit", "train.py:17")
    assert "reached the time limit at train.py:17 after 1 optimizer step" in ending(found.script)


def test_the_time_limit_is_raised_again(run_script: RunScript) -> None:
    text = "try:\n    time.sleep(20)\nexcept:\n    pass\ntime.sleep(20)\n"
    found = run_script(LOOP + MODEL + "train(model, optimizer, 1)\nimport time\n" + text, time_limit=0.5).prediction
    assert found is not None and found.script is not None
    assert (found.script.ending, found.script.place) == ("time limit", "train.py:21")


@pytest.mark.parametrize(
    "wait", ["queue.Queue().get()", "threading.Event().wait()", "concurrent.futures.Future().result()"]
)
def test_the_time_limit_names_the_line_that_waits(run_script: RunScript, wait: str) -> None:
    text = f"import concurrent.futures, queue, threading\n{wait}\n"
    assert run_script(text, time_limit=0.5).message.endswith("within 0.5 s (--time-limit) (it was at train.py:2)")


def test_the_time_limit_names_the_line_of_a_library_where_there_is_none_of_the_user(tmp_path: Path) -> None:
    module = tmp_path / "site-packages/of_a_test.py"
    module.parent.mkdir()
    module.write_text("import threading\nthreading.Event().wait()\n")
    job = Job(read_command([str(module)]), ("t4",), time_limit=0.5)
    assert run_job(job, "t4").message.endswith("(it was at site-packages/of_a_test.py:2)")


def test_the_end_of_the_steps_is_no_error_in_the_log(run_script: RunScript, caplog: pytest.LogCaptureFixture) -> None:
    text = (
        "import logging\nlogging.error('before')\ntry:\n    train(model, optimizer, 9)\n"
        "except BaseException as error:\n    logging.error('terminating due to %s', error)\n    raise\n"
    )
    found = run_script(LOOP + MODEL + text).prediction
    assert found is not None and found.script is not None and found.script.ending == "steps"
    assert caplog.messages == ["before"]


def test_a_model_may_be_called_on_the_cpu_before_it_moves(run_script: RunScript) -> None:
    text = MODEL.replace("model.cuda()", "with torch.no_grad():\n    model(torch.ones(3, 16)).mean()\nmodel.cuda()")
    found = run_script(LOOP + text + "train(model, optimizer, 5)\n")
    assert found.message == ""
    assert found.prediction is not None
    assert found.prediction.memory.components.weights == 1024 + 512


def test_tensors_of_safetensors_are_loaded_where_the_script_says(run_script: RunScript) -> None:
    text = """
import safetensors, safetensors.torch as st, transformers
st.save_file({"a": torch.zeros(4, 256, device="cuda"), "b": torch.ones(2)}, "own.safetensors", {"step": "1"})
assert not st.load_file("own.safetensors")["a"].is_cuda
before = torch.cuda.memory_allocated()
kept = st.load_file("own.safetensors", device="cuda:0")
assert kept["a"].shape == (4, 256) and torch.cuda.memory_allocated() == before + 4096 + 512
with safetensors.safe_open("own.safetensors", framework="pt", device="cuda") as file:
    assert file.metadata() == {"step": "1"} and list(file.keys()) == ["a", "b"]
    assert file.get_tensor("b").is_cuda
st.save_model(model, "model.safetensors")
st.load_model(model, "model.safetensors")
assert os.path.getsize("beside.safetensors") and st.load_file("beside.safetensors")["w"].tolist() == [1.0, 2.0]
train(model, optimizer, 5)
"""
    save_file({"w": torch.tensor([1.0, 2.0])}, "beside.safetensors")
    assert run_script("import os\n" + LOOP + MODEL + text).message == ""


def test_nvidia_smi_describes_the_simulated_gpu(run_script: RunScript) -> None:
    text = """
import os, subprocess
query = "nvidia-smi --query-gpu=name,memory.total,memory.used --format=csv,noheader,nounits"
total = torch.cuda.mem_get_info()[1] >> 20
used = (torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]) >> 20
expected = f"{torch.cuda.get_device_name()}, {total}, {used}\\n"
assert subprocess.check_output(query.split(), text=True) == expected
assert subprocess.run(query, shell=True, capture_output=True, encoding="utf-8").stdout == expected
assert os.popen("nvidia-smi --query-gpu=memory.used --format=csv | tail -n 1").read() == f"{used} MiB\\n"
assert str(total) in subprocess.getoutput("nvidia-smi")
assert os.system("nvidia-smi > listed.txt") == 0 and not os.path.exists("listed.txt")
train(model, optimizer, 5)
"""
    found = run_script(LOOP + MODEL + text)
    assert found.message == ""
    assert found.prediction is not None and found.prediction.script is not None
    noted = {(one.kind, one.name): one.times for one in found.prediction.script.stand_ins}
    assert noted == {("monitor", "nvidia-smi"): 4, ("command", "nvidia-smi > listed.txt"): 1}


def test_a_checkpoint_of_safetensors_goes_nowhere(run_script: RunScript, tmp_path: Path) -> None:
    text = """
import transformers
from accelerate import Accelerator
accelerator = Accelerator()
model, optimizer = accelerator.prepare(model, optimizer)
train(model, optimizer, 1)
accelerator.save_state("out")
accelerator.load_state("out")
train(model, optimizer, 5)
"""
    found = run_script(LOOP + MODEL + text)
    assert found.message == ""
    assert found.prediction is not None
    assert found.prediction.script is not None
    assert str(tmp_path / "out/model.safetensors") in found.prediction.script.writes
    assert not (tmp_path / "out").exists()


TRAINING = """
import torch
from torch import nn

class Loop:
    def __init__(self, inner=False):
        self.model, self.inner = nn.Linear(8, 8).cuda(), inner
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def step(self, zero_first):
        if self.inner:
            quick = torch.optim.SGD(self.model.parameters(), 0.1)
            self.model(torch.ones(4, 8, device="cuda")).sum().backward()
            quick.step()
        if zero_first:
            self.optimizer.zero_grad()
        self.model(torch.ones(4, 8, device="cuda")).sum().backward()
        self.optimizer.step()
        if not zero_first:
            self.optimizer.zero_grad()

"""


@pytest.mark.parametrize("zero_first", [True, False])
@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("lengths", [(4, 4, 4), (1, 3, 2), (1, 1, 1, 1)])
def test_the_steps_of_several_trainings_count(
    run_script: RunScript, zero_first: bool, keeps: bool, lengths: tuple[int, ...]
) -> None:
    text = f"""
kept = []
for steps in {lengths}:
    loop = Loop()
    {"kept.append(loop)" if keeps else ""}
    for _ in range(steps):
        loop.step({zero_first})
"""
    found = run_script(TRAINING + text, steps=20).prediction
    assert found is not None and found.script is not None
    assert (found.script.ending, found.script.steps) == ("finished", sum(lengths))


def test_an_optimizer_that_is_made_anew_in_each_step_makes_no_training(run_script: RunScript) -> None:
    text = "loop = Loop(inner=True)\nfor _ in range(6):\n    loop.step(False)\n"
    found = run_script(TRAINING + text, steps=20).prediction
    assert found is not None and found.script is not None
    assert found.script.steps in (6, 7)


def test_an_optimizer_that_joins_later_steps_with_the_others(run_script: RunScript) -> None:
    text = """
first = Loop()
for _ in range(3):
    first.step(False)
second = Loop()
for _ in range(4):
    for loop in (first, second):
        loop.model(torch.ones(4, 8, device="cuda")).sum().backward()
    for loop in (first, second):
        loop.optimizer.step()
    for loop in (first, second):
        loop.optimizer.zero_grad()
"""
    found = run_script(TRAINING + text, steps=20).prediction
    assert found is not None and found.script is not None
    assert found.script.steps == 7


@pytest.mark.parametrize(("text", "code"), [("import transformers\n", MissingLibrary.exit_code), ("", 0)])
def test_a_script_that_imports_a_transformers_that_is_too_old_is_told_the_oldest(
    tmp_path: Path, text: str, code: int
) -> None:
    libraries = tmp_path / "libraries"
    package, described = libraries / "transformers", libraries / "transformers-5.0.0.dist-info"
    package.mkdir(parents=True)
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 5.0.0\n")
    (package / "dependency_versions_table.py").touch()
    (package / "__init__.py").write_text(
        "from . import dependency_versions_table\nraise ImportError('tokenizers is too new')\n"
    )
    script = tmp_path / "train.py"
    script.write_text(text + LOOP + MODEL + "train(model, optimizer, 5)\n")
    path = os.pathsep.join([str(libraries), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "trainatomy", "run", "--gpu", "t4", str(script)],
        env={**os.environ, "PYTHONPATH": path},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    told = "train.py:1: trainatomy needs transformers 5.1 or later, found 5.0.0: pip install --upgrade transformers"
    assert (told in done.stderr) == bool(text)
