"""Commands that train are followed, whoever starts them and by whatever function."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from script_types import RunScript

from trainatomy.errors import SimulationError, WorkloadError
from trainatomy.reporters.script_sentences import script_sentences
from trainatomy.scripts import launch
from trainatomy.scripts.command import read_command
from trainatomy.scripts.job import Handover, Job, Outcome

PYTHON = "import os, subprocess, sys\n"
LOOP = """
import torch
model = torch.nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(3):
    model(torch.ones(8, 16, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the file of an installed library that scripts may import."""
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    yield folder / "library_of_a_test.py"
    sys.modules.pop("library_of_a_test", None)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("subprocess.run(['torchrun', '--nnodes', '2', 'x.py'])", ("torchrun", "--nnodes", "2", "x.py")),
        ("os.system('for i in 1 2; do torchrun x.py; done')", ("torchrun", "x.py")),
        ("subprocess.run('accelerate launch x.py --lr 1', shell=True)", ("accelerate", "launch", "x.py", "--lr", "1")),
        ("os.system('cd . && torchrun x.py')", ("torchrun", "x.py")),
        ("os.popen('python -m torch.distributed.run x.py')", ("torchrun", "x.py")),
        ("os.spawnvp(os.P_WAIT, 'torchrun', ['torchrun', 'x.py'])", ("torchrun", "x.py")),
        ("os.posix_spawnp('torchrun', ['torchrun', 'x.py'], os.environ)", ("torchrun", "x.py")),
        ("os.execvp('torchrun', ['torchrun', 'x.py'])", ("torchrun", "x.py")),
        ("os.execv(sys.executable, [sys.executable, '-u', 'x.py', '1'])", ("python", "x.py", "1")),
        (
            "import torch.multiprocessing as mp; mp.spawn(print, nprocs=2)",
            ("torchrun", "--nproc-per-node=2", "train.py", "--lr", "1"),
        ),
        (
            "import torch.multiprocessing as mp; mp.start_processes(print, nprocs=2, start_method='fork')",
            ("torchrun", "--nproc-per-node=2", "train.py", "--lr", "1"),
        ),
        (
            "import torch.distributed.run as run; run.main(['--nproc-per-node', '2', 'x.py', 'a'])",
            ("torchrun", "--nproc-per-node=2", "x.py", "a"),
        ),
        (
            "from accelerate import notebook_launcher; notebook_launcher(print, num_processes=2)",
            ("torchrun", "--nproc-per-node=2", "train.py", "--lr", "1"),
        ),
        (
            "from accelerate.commands.launch import launch_command, launch_command_parser as parser\n"
            "launch_command(parser().parse_args(['--num_processes', '2', 'x.py', 'a']))",
            ("torchrun", "--nproc-per-node=2", "x.py", "a"),
        ),
    ],
)
def test_what_a_script_leaves_the_training_to(
    run_script: RunScript, monkeypatch: pytest.MonkeyPatch, start: str, words: tuple[str, ...]
) -> None:
    monkeypatch.delitem(sys.modules, "bitsandbytes", raising=False)  # of another test; accelerate starts none beside it
    found = run_script(PYTHON + start, "--lr", "1")
    assert found.handover is not None, found.message
    assert found.handover.words == words


@pytest.mark.parametrize(
    "start",
    [
        "subprocess.run([sys.executable, '-u', 'x.py'], env={**os.environ, 'OF_A_TEST': '1'}, cwd='/')",
        "os.chdir('/'); subprocess.run('OF_A_TEST=1 python x.py', shell=True)",
        "os.chdir('/'); os.posix_spawn(sys.executable, [sys.executable, 'x.py'], {**os.environ, 'OF_A_TEST': '1'})",
    ],
)
def test_a_python_of_a_library_is_followed(run_script: RunScript, library: Path, start: str) -> None:
    library.write_text(PYTHON + start)
    assert run_script("import library_of_a_test").handover == Handover(("python", "x.py"), {"OF_A_TEST": "1"}, "/")


def test_a_rank_of_several_is_followed_as_the_first(run_script: RunScript, library: Path) -> None:
    library.write_text(
        f"{PYTHON}subprocess.Popen([sys.executable, 'x.py'], env={{**os.environ, 'WORLD_SIZE': '8', 'RANK': '5', "
        "'LOCAL_WORLD_SIZE': '4', 'LOCAL_RANK': '1'})"
    )
    found = run_script("import library_of_a_test").handover
    assert found is not None
    assert (found.words, dict(found.variables)) == (("torchrun", "--nnodes=2", "--nproc-per-node=4", "x.py"), {})


def test_a_script_that_was_written_in_the_run_is_found(run_script: RunScript, library: Path) -> None:
    library.write_text(
        f"{PYTHON}os.mkdir('made')\nopen('made/x.py', 'w').write('1')\n"
        "subprocess.run([sys.executable, os.path.abspath('made/x.py')], cwd='made')"
    )
    found = run_script("import library_of_a_test").handover
    assert found is not None
    assert found.words[1].endswith("made/x.py") and "trainatomy-run-" in found.words[1]
    assert "trainatomy-run-" in found.folder


@pytest.mark.parametrize(
    "start",
    ["subprocess.run(['torchrun', 'x.py'])", "subprocess.run([sys.executable, 'x.py'])", "os.system('torchrun x.py')"],
)
def test_a_script_that_trains_already_starts_no_other(run_script: RunScript, library: Path, start: str) -> None:
    library.write_text(PYTHON + start)
    found = run_script(LOOP + "import library_of_a_test")
    assert found.handover is None
    assert found.prediction is not None and found.prediction.script is not None
    assert [each.kind for each in found.prediction.script.stand_ins] == ["command"]
    assert "starts another process" in run_script(LOOP + PYTHON + start).message


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("subprocess.run([sys.executable, 'x.py', '1'])", "Run what it starts by itself: trainatomy run"),
        ("os.system('python x.py > log.txt')", "train.py:2 starts another process"),
        ("os.system('for i in 1 2; do torchrun x.py --lr $i; done')", "train.py:2 starts another process"),
        ("os.execv('/bin/true', ['true'])", "train.py:2 starts another process"),
        (
            "from concurrent.futures import ProcessPoolExecutor as P; os.forkpty()",
            "train.py:2 starts another process",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(run_script: RunScript, start: str, message: str) -> None:
    found = run_script(PYTHON + start)
    assert message in found.message
    assert found.exit_code == SimulationError.exit_code


@pytest.mark.parametrize(
    "start",
    [
        "subprocess.run([sys.executable, '-m', 'pip', 'install', 'x'], check=True)",
        "os.system('pip install x')",
        "import multiprocessing as mp; mp.get_context('spawn').Lock()",
        "import uuid; uuid.uuid1()",
    ],
)
def test_what_is_no_training_is_left_out(run_script: RunScript, start: str) -> None:
    assert run_script(PYTHON + start + LOOP).message == ""


def test_questions_are_answered(run_script: RunScript) -> None:
    text = """
import ctypes.util, shutil
assert subprocess.check_output(["uname", "-s"], text=True) == "Linux\\n"
assert int(subprocess.check_output("nproc")) > 0
assert os.popen("touch x; uname").read() == ""
assert os.popen("echo hello").read() == "hello\\n"
assert subprocess.check_output(["ls", "/proc/self/task"]).strip()
assert ctypes.util.find_library("c") == "libc.so.6"
assert os.system("uname -s > /dev/null") == 0
"""
    found = run_script(PYTHON + text + LOOP)
    assert found.message == ""
    assert found.prediction is not None and found.prediction.script is not None
    assert [each.name for each in found.prediction.script.stand_ins] == ["touch x; uname"]


def test_python_and_the_machine_say_who_they_are(run_script: RunScript) -> None:
    text = """
import platform, socket
version = f"Python {platform.python_version()}\\n"
assert subprocess.check_output([sys.executable, "--version"], text=True) == version
assert os.popen(f"{sys.executable} -V").read() == version
assert socket.gethostbyname(socket.gethostname()).startswith("127.")
assert socket.getaddrinfo(host=socket.gethostname(), port=80)
"""
    found = run_script(PYTHON + text + LOOP)
    assert found.message == ""


def test_a_question_to_a_program_that_may_not_be_executed_is_left_out(run_script: RunScript, tmp_path: Path) -> None:
    (tmp_path / "uname").touch(mode=0o600)
    assert run_script(f"{PYTHON}assert subprocess.check_output(['./uname']) == b''\n{LOOP}").message == ""


def test_a_program_that_is_missing_is_missing_for_a_library(run_script: RunScript, library: Path) -> None:
    library.write_text(f"{PYTHON}subprocess.run(['program-of-a-test'])")
    assert "FileNotFoundError" in run_script("import library_of_a_test").message


def test_a_followed_command_runs_in_a_new_process_and_finds_what_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "start.py").write_text(
        f"{PYTHON}os.makedirs('data')\nopen('data/text', 'w').write('prepared')\nos.environ['OF_A_TEST'] = '1'\n"
        "subprocess.run(['torchrun', '--nproc-per-node', '2', 'train.py'])"
    )
    (tmp_path / "train.py").write_text(
        "import os\nassert open('data/text').read() == 'prepared' and os.listdir('data') == ['text']\n"
        f"assert os.environ['OF_A_TEST'] == '1' and os.environ['WORLD_SIZE'] == '2'\n{LOOP}"
    )
    monkeypatch.chdir(tmp_path)
    (outcome,) = launch.run_script(Job(read_command(["start.py", "--x"]), ("h100-sxm",)), tmp_path / "output")
    assert outcome.message == ""
    assert outcome.prediction is not None and outcome.prediction.script is not None
    assert outcome.prediction.script.command == ("start.py", "--x")
    assert "followed: torchrun --nproc-per-node 2 train.py" in script_sentences(outcome.prediction.script)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("python", "x.py"), SimulationError.exit_code, "x.py starts `python x.py`: that is the 5th command"),
        (("deepspeed", "x.py"), WorkloadError.exit_code, "t.py starts `deepspeed x.py`: deepspeed takes all GPUs"),
    ],
)
def test_following_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], code: int, message: str
) -> None:
    def outcomes(*_: Any) -> tuple[Outcome, ...]:
        return (Outcome("t4", handover=Handover(words, {}, "/")),)

    monkeypatch.setattr(launch, "_outcomes", outcomes)
    (tmp_path / "t.py").touch()
    (found,) = launch.run_script(Job(read_command([str(tmp_path / "t.py")]), ("t4",)))
    assert (found.exit_code, found.message[: len(message)]) == (code, message)


def test_a_started_command_gets_the_variables_of_the_first() -> None:
    job = Job(read_command(["env", "MAX_PIXELS=9", "python", "start.py"]), ("l4",))
    followed = job.handed_over(Handover(("env", "A=1", "python", "x.py"), {}, "."))
    assert dict(followed.command.variables) == {"MAX_PIXELS": "9", "A": "1"}
