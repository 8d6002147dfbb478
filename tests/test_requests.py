"""Requests: keywords of Python and options of the command line set the same fields, with the same defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import FrozenInstanceError, dataclass, fields
from functools import partial
from typing import Annotated, Any

import pytest

import trainatomy
from trainatomy.cli import main
from trainatomy.cli.app import COMMANDS, load
from trainatomy.cli.options import command
from trainatomy.errors import WorkloadError
from trainatomy.option import Option, in_output, offered, shared_fields, whole_numbers
from trainatomy.requests.comparing import CompareRequest
from trainatomy.requests.fitting import FitRequest
from trainatomy.requests.measuring import CalibrateRequest, DiagnoseRequest, LoaderRequest, MeasureRequest
from trainatomy.requests.predicting import OpsRequest, PredictRequest
from trainatomy.requests.scripts import ScriptRequest

ASKED: list[tuple[Callable[..., Any], type[Any]]] = [
    (trainatomy.predict, PredictRequest),
    (trainatomy.ops, OpsRequest),
    (trainatomy.compare, CompareRequest),
    (trainatomy.compare_gpus, CompareRequest),
    (trainatomy.fit, FitRequest),
    (trainatomy.fit_gpus, FitRequest),
    (trainatomy.why_out_of_memory, FitRequest),
    (trainatomy.measure, MeasureRequest),
    (trainatomy.calibrate, CalibrateRequest),
    (trainatomy.diagnose, DiagnoseRequest),
    (trainatomy.time_loader, LoaderRequest),
    (trainatomy.run_script, ScriptRequest),
]


@pytest.mark.parametrize(("function", "request_class"), ASKED)
def test_keywords_have_the_defaults_of_the_request(function: Callable[..., Any], request_class: type[Any]) -> None:
    defaults = {field.name: field.default for field in fields(request_class)}
    keywords = inspect.signature(function).parameters
    shared = [name for name in keywords if name in defaults]
    assert len(shared) >= 2
    assert {name: keywords[name].default for name in shared} == {name: defaults[name] for name in shared}


@dataclass(frozen=True, slots=True)
class Asked:
    numbers: Annotated[
        tuple[int, ...],
        Option("--numbers", "Numbers.", metavar="N,N", words=str | None, read=partial(whole_numbers, "--numbers")),
    ] = (1,)
    names: Annotated[tuple[str, ...], Option("--name", "A name; repeatable.")] = ()
    only_python: int = 3


@dataclass(frozen=True, slots=True)
class Shown(Asked):
    FIRST = ("json", "names")

    json: Annotated[bool, in_output("--json", "Print JSON.")] = False


def test_an_option_is_a_field_of_the_request() -> None:
    options = offered(Shown)
    assert [(name, offer.option.name) for name, offer in options.items()] == [
        ("json", "--json"),
        ("names", "--name"),
        ("numbers", "--numbers"),
    ]
    assert (options["names"].kind, options["names"].default) == (list[str], None)
    assert options["numbers"].read("4, 5") == (4, 5)
    assert shared_fields(Asked, Shown(names=("a",), json=True)) == {"numbers": (1,), "names": ("a",), "only_python": 3}


def test_a_command_calls_its_verb_with_one_request() -> None:
    seen: list[Shown] = []

    def verb(request: Shown) -> None:
        """Do it."""
        seen.append(request)

    called = command(verb)
    called(json=True, names=["a", "b"], numbers=None)
    called(json=False, names=[], numbers="7")
    assert seen == [Shown(names=("a", "b"), json=True), Shown(numbers=(7,))]
    with pytest.raises(WorkloadError, match="--numbers x: 'x' is not a whole number"):
        called(numbers="x")
    with pytest.raises(FrozenInstanceError):
        seen[0].json = False  # type: ignore[misc]


@pytest.mark.parametrize("name", [entry.name for entry in COMMANDS])
def test_options_of_a_command_have_help_and_names_of_their_own(name: str) -> None:
    shown = [option for option in load(name).params if not getattr(option, "hidden", False)]
    assert all(option.help for option in shown)
    spelt = [spelling for option in load(name).params for spelling in (*option.opts, *option.secondary_opts)]
    assert len(spelt) == len(set(spelt))


@pytest.mark.parametrize("option", ["--headroom 200", "--maximize memory", "--keep nothing", "--allow anything"])
def test_a_wrong_value_is_named_with_its_option(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--model", "gpt2", "--gpu", "t4", *option.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {option.split()[0]}")
