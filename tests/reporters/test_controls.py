"""Foreign text is shown and never obeyed: no page, note, error or JSON carries a control character."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.text import Text

from trainatomy.cli import exits
from trainatomy.cli.output import note, show, show_json
from trainatomy.errors import SimulationError, WorkloadError
from trainatomy.reporters.document import Bullets, figures, section
from trainatomy.reporters.text.prediction import prediction_page
from trainatomy.reporters.text.rendering import Paper, render
from trainatomy.results.memory import Instant, ModuleActivations
from trainatomy.results.prediction import Prediction
from trainatomy.units import CONTROLS, printable

HOSTILE = ("\x1b]0;title\x07", "\x1b[31mred\x1b[0m", "\x9b2J", "\r\b\x00\x7f", "\x1bP+q\x1b\\")
"""A title and a colour, the same in one byte, what moves the cursor, and a request that the terminal answers."""


def obeyed(text: str) -> list[str]:
    return [character for character in text if character in CONTROLS]


def hostile(prediction: Prediction) -> Prediction:
    name = "".join(HOSTILE)
    memory = replace(prediction.memory, peak=Instant(1, "backward", name, name))
    modules = (ModuleActivations(name, 2**30, 3),)
    return replace(prediction, name=name, memory=memory, modules=modules, notes=(name,), leading_notes=(name,))


@pytest.mark.parametrize("text", HOSTILE)
def test_text_is_kept_without_what_a_terminal_obeys(text: str) -> None:
    assert obeyed(printable(text)) == []
    assert [each for each in printable(text) if each.isalnum()] == [each for each in text if each.isalnum()]


def test_lines_and_tabulators_are_kept() -> None:
    assert printable("one\n\ttwo ⟶ größer") == "one\n\ttwo ⟶ größer"


@pytest.mark.parametrize("width", [80, 120])
def test_no_page_carries_control_characters(prediction: Prediction, width: int) -> None:
    page = render(prediction_page(hostile(prediction)), width)
    assert obeyed(page) == [] and "]0;title" in page


def test_colours_of_ours_are_kept_on_a_terminal() -> None:
    screen = io.StringIO()
    table = figures([(HOSTILE[0], Text("1", style="red"))], "name", numbers=("size",))
    paper = Paper(file=screen, force_terminal=True, width=60, color_system="standard", legacy_windows=False)
    paper.print(section(HOSTILE[0], table, Bullets(HOSTILE)))
    assert obeyed(re.sub(r"\x1b\[[\d;]*m", "", screen.getvalue())) == []
    assert "\x1b[31m" in screen.getvalue()


@pytest.mark.parametrize(
    "spoken",
    [
        note,
        lambda text: exits.report(WorkloadError(text), debug=False),
        lambda text: exits.report(SimulationError(text), debug=False),
        lambda text: exits.report(RuntimeError(text), debug=False),
        lambda text: exits.report(FileNotFoundError(2, "missing", text), debug=False),
        lambda text: show(Text(text)),
        lambda text: show_json({text: [text]}),
    ],
    ids=["note", "workload", "simulation", "bug", "file", "page", "JSON"],
)
def test_nothing_that_is_printed_carries_them(
    spoken: Callable[[str], object], capsys: pytest.CaptureFixture[str]
) -> None:
    spoken("".join(HOSTILE))
    captured = capsys.readouterr()
    assert obeyed(captured.out + captured.err) == [] and "]0;title" in captured.out + captured.err


def test_json_keeps_every_character(capsys: pytest.CaptureFixture[str]) -> None:
    show_json({"name": "".join(HOSTILE)})
    assert json.loads(capsys.readouterr().out) == {"name": "".join(HOSTILE)}
