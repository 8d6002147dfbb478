"""Commands by what they are, in all their spellings."""

from __future__ import annotations

import pytest

from trainatomy.scripts.programs import Words, command_of, commands_of, is_question, launched, programs, python_command


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("torchrun --nproc-per-node 2 train.py", ("torchrun", "--nproc-per-node", "2", "train.py")),
        ("/venv/bin/torchrun train.py", ("torchrun", "train.py")),
        ("python -m torch.distributed.run train.py", ("torchrun", "train.py")),
        ("/usr/bin/python3.12 -u -X dev -m torch.distributed.launch train.py", ("torchrun", "train.py")),
        ("python /venv/bin/torchrun train.py", ("torchrun", "train.py")),
        ("accelerate launch --num_processes 2 train.py", ("accelerate", "launch", "--num_processes", "2", "train.py")),
        ("python -m accelerate.commands.launch train.py", ("accelerate", "launch", "train.py")),
        ("python -m accelerate.commands.accelerate_cli launch train.py", ("accelerate", "launch", "train.py")),
        ("A=1 nohup nice -n 5 torchrun train.py", ("torchrun", "train.py")),
        ("numactl --cpunodebind=0 accelerate launch train.py", ("accelerate", "launch", "train.py")),
        ("deepspeed train.py", ("deepspeed", "train.py")),
        ("python train.py", None),
        ("accelerate env", None),
        ("python -m pip install torchrun", None),
        ("touch torchrun", None),
    ],
)
def test_launchers_in_all_spellings(line: str, expected: tuple[str, ...] | None) -> None:
    commands = commands_of(line)
    assert commands is not None
    assert launched(commands[0]) == expected


@pytest.mark.parametrize(
    ("line", "kind", "target", "words"),
    [
        ("python train.py --lr 1", "file", "train.py", ("train.py", "--lr", "1")),
        ("python3 -m pkg.train --lr 1", "-m", "pkg.train", ("-m", "pkg.train", "--lr", "1")),
        ("python -mpkg x", "-m", "pkg", ("-m", "pkg", "x")),
        ("python -W ignore -u -B -c 'import a' b", "-c", "import a", ("-c", "import a", "b")),
        ("python", "", "", ()),
        ("python - x", "", "", ("-", "x")),
    ],
)
def test_what_python_runs(line: str, kind: str, target: str, words: tuple[str, ...]) -> None:
    commands = commands_of(line)
    assert commands is not None
    called = python_command(commands[0])
    assert (called.kind, called.target, called.words) == (kind, target, words)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("uname -p", True),
        ("/sbin/ldconfig -p", True),
        ("ldconfig", False),
        ("hostname", True),
        ("ls -l data", True),
        ("hostname other", False),
        ("git rev-parse HEAD", True),
        ("git -C /x -c a=b describe --tags", True),
        ("git config user.name x", False),
        ("git config --get user.name", True),
        ("git push", False),
        ("gcc --version", True),
        ("gcc -o a a.c", False),
        ("nvcc --version", True),
        ("date +%F", True),
        ("date -s 10:00", False),
        ("numactl --hardware", True),
        ("numactl -N 0 ./a.out", False),
        ("rm -rf /", False),
    ],
)
def test_questions_only_read(line: str, expected: bool) -> None:
    commands = commands_of(line)
    assert commands is not None
    assert [is_question(each) for each in commands] == [expected]


def test_a_line_of_a_shell_is_divided_or_not_understood() -> None:
    assert commands_of("cd x && A=1 python t.py 2>&1 | tail; ls") == [
        Words(("cd", "x"), {}),
        Words(("python", "t.py"), {"A": "1"}),
        Words(("tail",), {}),
        Words(("ls",), {}),
    ]
    assert commands_of("which gcc 2>/dev/null >/dev/null") == [Words(("which", "gcc"), {})]
    assert commands_of("echo x > file") is None
    assert commands_of("echo $(python t.py)") is None
    assert commands_of("echo 'unbalanced") is None


def test_variables_before_a_command_and_its_wrapper_are_kept() -> None:
    assert command_of(["A=1", "env", "B=2", "python", "t.py"]) == Words(("python", "t.py"), {"A": "1", "B": "2"})
    assert command_of(["env"]) == Words(("env",), {})
    assert command_of([]) == Words((), {})


def test_no_program_that_may_be_executed_runs_python_or_a_shell_but_one() -> None:
    assert not {"python", "python3", "bash", "env", "xargs", "find"} & set(programs())
