"""Commands of installed packages, modules, and what people type before a script."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainatomy.errors import WorkloadError
from trainatomy.scripts import job
from trainatomy.scripts.command import read_command, with_gpus
from trainatomy.scripts.imports import preload
from trainatomy.scripts.job import Job, add_run, is_users, place_of
from trainatomy.scripts.run import run_job

TRAINS = """
import sys
import torch
def main():
    assert sys.argv[1:] == ["train", "--lr", "1"]
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(5):
        model(torch.ones(4, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
class Application:
    start = staticmethod(main)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of an installed package with two commands, which is on the path; its files are elsewhere."""
    library, scripts = tmp_path / "library", tmp_path / "scripts"
    folder = library / "framework_of_tests"
    folder.mkdir(parents=True)
    scripts.mkdir()
    folder.joinpath("__init__.py").write_text("raise RuntimeError('imported')\n")
    folder.joinpath("cli.py").write_text(TRAINS)
    information = library / "framework_of_tests-1.0.dist-info"
    information.mkdir()
    information.joinpath("METADATA").write_text("Metadata-Version: 2.1\nName: framework-of-tests\nVersion: 1.0\n")
    information.joinpath("entry_points.txt").write_text(
        "[console_scripts]\nframework-cli = framework_of_tests.cli:main\n"
        "framework = framework_of_tests.cli:Application.start\n"
    )
    for name in ("framework-cli", "framework"):
        file = scripts / name
        file.write_text(f"#!{sys.executable}\n")
        file.chmod(0o755)
    monkeypatch.syspath_prepend(library)
    monkeypatch.setenv("PATH", str(scripts), prepend=":")
    monkeypatch.chdir(tmp_path)
    return folder


def script(folder: Path, name: str, first_line: str) -> None:
    file = folder / name
    file.write_text(first_line + "\n")
    file.chmod(0o755)


@pytest.mark.parametrize("name", ["framework-cli", "framework"])
def test_a_command_of_a_package_runs(package: Path, name: str) -> None:
    package.joinpath("__init__.py").write_text("")
    preload()
    command = read_command([name, "train", "--lr", "1"])
    assert command.file() == package / "cli.py"
    assert Path(command.package()) == package
    found = run_job(Job(command, ("h100-sxm",)), "h100-sxm")
    assert found.message == ""
    assert found.prediction is not None
    for module in ("framework_of_tests", "framework_of_tests.cli"):
        sys.modules.pop(module, None)


def test_a_command_whose_module_is_in_a_folder_without_init_is_found(package: Path) -> None:
    information = next(package.parent.glob("*.dist-info"))
    information.joinpath("entry_points.txt").write_text(
        "[console_scripts]\nframework-cli = framework_of_tests.scripts.train:main\n"
    )
    package.joinpath("scripts").mkdir()
    package.joinpath("scripts", "train.py").write_text(TRAINS)
    command = read_command(["framework-cli", "train"])
    assert command.file() == package / "scripts" / "train.py"
    package.joinpath("scripts", "train.py").unlink()
    with pytest.raises(WorkloadError, match=r"framework_of_tests\.scripts has no module train"):
        command.file()


@pytest.mark.parametrize(("status", "ending"), [("None", "finished"), ("0", "finished"), ("3", "exit")])
def test_a_command_that_returns_has_ended_as_a_script_does(package: Path, status: str, ending: str) -> None:
    package.joinpath("__init__.py").write_text("")
    package.joinpath("cli.py").write_text(f"{TRAINS.replace('range(5)', 'range(2)')}\nclass Application:\n"
                                          f"    def start():\n        main()\n        return {status}\n")  # fmt: skip
    preload()
    found = run_job(Job(read_command(["framework", "train", "--lr", "1"]), ("h100-sxm",)), "h100-sxm")
    assert found.prediction is not None and found.prediction.script is not None
    assert found.prediction.script.ending == ending
    for module in ("framework_of_tests", "framework_of_tests.cli"):
        sys.modules.pop(module, None)


def test_a_command_or_module_is_found_without_importing_its_package(package: Path) -> None:
    """Importing would run its code outside of the simulation."""
    assert read_command(["framework-cli"]).file() == package / "cli.py"
    assert read_command(["-m", "framework_of_tests.cli"]).file() == package / "cli.py"
    assert "framework_of_tests" not in sys.modules


def test_a_python_script_of_this_environment_is_run_as_it_is(package: Path) -> None:
    scripts = package.parents[1] / "scripts"
    script(scripts, "own-command", f"#!{sys.executable}")
    assert read_command(["own-command"]).file() == scripts / "own-command"
    assert read_command(["own-command"]).package() == ""


@pytest.mark.parametrize(
    ("first_line", "message"),
    [
        ("#!/bin/bash", "is no Python script"),
        ("\x7fELF", "is no Python script"),
        ("#!/elsewhere/bin/python3.12", r"belongs to another Python, /elsewhere/bin/python3\.12"),
        ("#!/bin/sh\n'''exec' /elsewhere/very/long/bin/python \"$0\" \"$@\"", "belongs to another Python"),
    ],
)
def test_other_commands_are_refused_with_the_reason(package: Path, first_line: str, message: str) -> None:
    script(package.parents[1] / "scripts", "other-command", first_line)
    with pytest.raises(WorkloadError, match=message):
        read_command(["other-command"]).file()


def test_a_command_that_is_nowhere_is_missing() -> None:
    with pytest.raises(WorkloadError, match="no such file or command: no-such-command"):
        read_command(["no-such-command"]).file()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_package_of_tests.cli", "there is no module no_package_of_tests"),
        ("framework_of_tests.none", "framework_of_tests has no module none"),
        ("framework_of_tests.cli.more", "framework_of_tests.cli is no package"),
        ("framework_of_tests", "a package without __main__"),
    ],
)
def test_a_missing_module_is_named(package: Path, name: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        read_command(["-m", name]).file()


def test_a_module_that_an_installed_release_lacks_is_named(package: Path) -> None:
    package.joinpath("__init__.py").write_text("import json.no_such_module\n")
    preload()
    found = run_job(Job(read_command(["framework-cli"]), ("h100-sxm",)), "h100-sxm")
    assert "needs json.no_such_module, which the installed json does not have" in found.message


@pytest.mark.parametrize("words", [["framework-cli"], ["-m", "framework_of_tests.cli"]])
def test_what_a_package_fails_to_import_is_reported_as_missing(package: Path, words: list[str]) -> None:
    package.joinpath("__init__.py").write_text("import no_such_library_of_tests\n")
    preload()
    found = run_job(Job(read_command(words), ("h100-sxm",)), "h100-sxm")
    assert "needs no_such_library_of_tests, which is not installed" in found.message


def test_lines_of_the_package_that_is_run_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not the user's code all the same: libraries start processes for other reasons."""
    monkeypatch.setattr(job, "_run", ())
    code = compile("raise ValueError", "/usr/lib/site-packages/framework/train.py", "exec")
    with pytest.raises(ValueError) as error:
        exec(code)
    assert not place_of(error.value).startswith("train.py")
    add_run("/usr/lib/site-packages/framework")
    assert place_of(error.value) == "train.py:1"
    assert not is_users("/usr/lib/site-packages/framework/train.py")


def test_a_folder_with_the_name_of_a_command_does_not_hide_it(package: Path, tmp_path: Path) -> None:
    tmp_path.joinpath("framework-cli").mkdir()
    assert read_command(["framework-cli"]).file() == package / "cli.py"


def test_the_function_of_a_command_may_be_in_a_package(package: Path) -> None:
    package.joinpath("cli.py").unlink()
    package.joinpath("cli").mkdir()
    package.joinpath("cli", "__init__.py").write_text(TRAINS)
    assert read_command(["framework-cli"]).file() == package / "cli" / "__init__.py"


@pytest.mark.parametrize(
    "words",
    [
        "python train.py --lr 1",
        "python3.11 -u -W ignore -X faulthandler train.py --lr 1",
        "/somewhere/bin/python train.py --lr 1",
        "uv run train.py --lr 1",
        "uv run python train.py --lr 1",
        "poetry run python -u train.py --lr 1",
        "pixi run python train.py --lr 1",
        "env A=1 B= python train.py --lr 1",
        "A=1 B= python train.py --lr 1",
        "nohup env A=1 uv run python train.py --lr 1",
        "torchrun --standalone --nproc-per-node 4 --no-python python train.py --lr 1",
        "python -m torch.distributed.run --nproc-per-node 4 train.py --lr 1",
        "uv run accelerate launch --num_processes 4 train.py --lr 1",
        "accelerate-launch --num_processes 4 train.py --lr 1",
        "python -m accelerate.commands.launch --num_processes 4 train.py --lr 1",
    ],
)
def test_what_people_type_before_a_script(words: str) -> None:
    command = read_command(words.split())
    assert (command.target, command.arguments, command.is_module) == ("train.py", ("--lr", "1"), False)
    assert command.launch is None or command.launch.gpus == 4
    assert command.launcher[:1] in ((), ("torchrun",), ("accelerate",))
    assert ("A", "1") in command.variables or "A=1" not in words


@pytest.mark.parametrize(
    "words",
    ["accelerate launch -m pkg.train --lr 1", "torchrun -m pkg.train --lr 1", "uv run python -m pkg.train --lr 1"],
)
def test_a_module_after_a_launcher_or_prefix(words: str) -> None:
    command = read_command(words.split())
    assert (command.target, command.arguments, command.is_module) == ("pkg.train", ("--lr", "1"), True)


@pytest.mark.parametrize(
    ("words", "gpus", "nodes", "arguments"),
    [
        ("deepspeed --num_gpus=4 train.py --lr 1", 4, 1, ("--local_rank=0", "--lr", "1")),
        ("deepspeed --include localhost:0,2 --master_port 1 train.py", 2, 1, ("--local_rank=0",)),
        ("deepspeed --no_local_rank --num_gpus 8 --num_nodes 2 --hostfile h train.py --lr 1", 8, 2, ("--lr", "1")),
        ("deepspeed --num_gpus 2 --module train.py --lr 1", 2, 1, ("--local_rank=0", "--lr", "1")),
    ],
)
def test_deepspeeds_launcher_is_understood(words: str, gpus: int, nodes: int, arguments: tuple[str, ...]) -> None:
    command = read_command(words.split())
    assert (command.target, command.arguments) == ("train.py", arguments)
    assert command.launch is not None and command.launcher[0] == "torchrun"
    assert (command.launch.gpus, command.launch.nodes) == (gpus, nodes)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("deepspeed --hostfile hosts --num_gpus 4 train.py", "--num_nodes M"),
        ("uv run --with torch train.py", "give the command after it"),
        ("python -c 1", "write the code into a file"),
        ("deepspeed train.py", "deepspeed --num_gpus N"),
    ],
)
def test_what_cannot_be_started(words: str, message: str) -> None:
    with pytest.raises(WorkloadError, match=message):
        read_command(words.split())


def test_several_visible_gpus_without_a_launcher_are_refused() -> None:
    command = read_command("CUDA_VISIBLE_DEVICES=0,1 python train.py".split())
    with pytest.raises(WorkloadError, match="--gpus 2"):
        with_gpus(command, None)
    assert with_gpus(command, 2).launch is not None
    assert with_gpus(read_command("CUDA_VISIBLE_DEVICES=1 python train.py".split()), None).launch is None
