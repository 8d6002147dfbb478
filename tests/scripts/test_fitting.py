"""Search over a script's own flags."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_types import RunScript

from trainatomy.cli import main
from trainatomy.errors import WorkloadError
from trainatomy.reporters.text.rendering import render
from trainatomy.reporters.text.script import script_fit_page
from trainatomy.requests.fitting import Wanted
from trainatomy.scripts import launch
from trainatomy.scripts.command import Command, read_command
from trainatomy.scripts.fitting import largest_flag, read_flags, search_flags, with_flags
from trainatomy.scripts.job import Job, Outcome

SCRIPT = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int)
parser.add_argument("--batch-size", type=int)
arguments = parser.parse_args()
model = torch.nn.Linear(arguments.width, arguments.width).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(5):
    model(torch.ones(arguments.batch_size, arguments.width, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_flag_goes_on_until_nothing_fits(run_script: RunScript) -> None:
    def run(command: Command) -> Outcome:
        return run_script(SCRIPT, *command.arguments)

    found = search_flags(
        read_command(["train.py", "--batch-size", "4"]), read_flags(["width=20000,40000,…"]), "h100-sxm", run
    )
    assert [each.flags["--width"] for each in found.candidates] == ["20000", "40000", "80000", "160000"]
    assert [each.fits for each in found.candidates] == [True, True, True, False]
    assert found.best is found.candidates[0]
    page = render(script_fit_page(found), width=120)
    assert "Fastest that fits: train.py --batch-size 4 --width 20000" in page
    assert "does not fit" in page


def test_a_flag_that_changes_nothing_any_more_does_not_go_on(run_script: RunScript) -> None:
    """A batch is no larger than the data set; the series would go on to the largest whole number."""
    script = SCRIPT.replace("torch.ones(arguments.batch_size,", "torch.ones(min(arguments.batch_size, 100_000),")

    def run(command: Command) -> Outcome:
        return run_script(script, *command.arguments)

    flags = read_flags(["batch-size=50000,100000,…"])
    found = search_flags(read_command(["train.py", "--width", "1024"]), flags, "h100-sxm", run)
    assert [each.flags["--batch-size"] for each in found.candidates] == ["50000", "100000", "200000"]
    assert found.best is not found.candidates[2]
    assert "--batch-size 200000 has the same memory and time" in render(script_fit_page(found), width=200)


@pytest.mark.parametrize(
    ("fails", "answer", "code"),
    [
        ("True", "The script failed with all values of its flags: train.py:7 raised RuntimeError: no 4", 3),
        ("arguments.width < 1000", "Nothing fits of 1 run; 1 other failed.", 0),
        ("arguments.width > 1000", "Fastest that fits: train.py --width 4", 0),
    ],
)
def test_a_script_that_fails_does_not_fit(
    run_script: RunScript,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fails: str,
    answer: str,
    code: int,
) -> None:
    ends = f"if {fails}: raise RuntimeError(f'no {{arguments.width}}')\nmodel ="
    script = SCRIPT.replace("arguments.batch_size", "4").replace("model =", ends)

    def run(job: Job, output: Path | None = None) -> tuple[Outcome, ...]:
        return (run_script(script, *job.command.arguments),)

    monkeypatch.setattr(launch, "run_script", run)
    assert main(["fit", "--script", "train.py", "--flag", "width=4,400000"]) == code
    page = " ".join(capsys.readouterr().out.split())
    assert answer in page
    assert ("--width 4: train.py:7 raised" in page) == (fails != "arguments.width > 1000")
    assert ("--width 400000: train.py:7 raised" in page) == (fails != "arguments.width < 1000")


def test_a_script_that_fails_after_its_steps_is_not_recommended(run_script: RunScript) -> None:
    script = SCRIPT.replace("range(5)", "range(2)") + "if arguments.width > 8: raise RuntimeError\n"

    def run(command: Command) -> Outcome:
        return run_script(script, *command.arguments)

    found = search_flags(read_command(["train.py", "--batch-size", "4"]), read_flags(["width=8,16"]), "h100-sxm", run)
    assert [(each.failed, each.fits, each.prediction is None) for each in found.candidates] == [
        (False, True, False),
        (True, False, False),
    ]


def test_flags_replace_those_of_the_command() -> None:
    command = read_command(["train.py", "--lr=0.1", "--bs", "4", "data"])
    found = with_flags(command, {"--bs": "8", "--lr": "1", "--new": "2"})
    assert found.arguments == ("--lr=1", "--bs", "8", "data", "--new", "2")
    assert found.typed == ("train.py", *found.arguments)


@pytest.mark.parametrize("text", ["batch_size", "batch_size=", "bs=…", "bs=4,2,…", "bs=a,b,…"])
def test_wrong_flags_are_refused(text: str) -> None:
    with pytest.raises(WorkloadError, match="--flag"):
        read_flags([text])


def test_the_largest_value_of_a_flag_is_found_past_those_that_fail(run_script: RunScript) -> None:
    script = SCRIPT.replace("model =", "assert arguments.width % 20000, 'a width of a kind'\nmodel =", 1)

    def run(command: Command) -> Outcome:
        return run_script(script, *command.arguments)

    command = read_command(["train.py", "--batch-size", "4", "--width=30000"])
    found = largest_flag(command, Wanted.of("width:10000"), "h100-sxm", run)
    widths = {int(each.flags["--width"]): each for each in found.candidates}
    assert found.best is widths[90000] and list(widths) == sorted(widths)
    assert widths[110000].prediction is not None and not widths[110000].fits
    assert all(each.failed == (not width % 20000) for width, each in widths.items())
    page = render(script_fit_page(found), width=200)
    assert "Largest --width that fits: 90000 (110000 would not fit): train.py --batch-size 4 --width=90000" in page
    assert "a width of a kind" in page


@pytest.mark.parametrize("words", [["train.py"], ["train.py", "--width", "wide"]])
def test_a_flag_needs_a_value_to_begin_with(words: list[str]) -> None:
    with pytest.raises(WorkloadError, match="give a whole number to begin with"):
        largest_flag(read_command(words), Wanted.of("width"), "t4", pytest.fail)
