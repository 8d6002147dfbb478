"""Requests: keywords of Python and options of the command line set the same fields, with the same defaults."""

from __future__ import annotations

import inspect
from dataclasses import FrozenInstanceError, dataclass
from functools import partial
from typing import Any

import pytest

import trainatomy
from trainatomy.api.verb import verb
from trainatomy.cli import main
from trainatomy.cli.app import COMMANDS, load
from trainatomy.cli.options import command
from trainatomy.errors import WorkloadError
from trainatomy.option import in_output, offered, option, shared_fields, whole_numbers
from trainatomy.requests.measuring import LoaderRequest

VERBS = [
    *("predict", "predict_in_detail", "ops", "compare", "compare_gpus", "fit", "fit_gpus", "why_out_of_memory"),
    *("measure", "calibrate", "diagnose", "time_loader", "run_script"),
]


@pytest.mark.parametrize("name", VERBS)
def test_every_keyword_of_a_verb_is_described_where_help_shows_it(name: str) -> None:
    function = getattr(trainatomy, name)
    text = inspect.getdoc(function) or ""
    named = [each for each in inspect.signature(function).parameters.values() if each.kind is not each.VAR_KEYWORD]
    assert len(named) >= 3
    assert [each.name for each in named if f"\n    {each.name}: " not in text] == []


@dataclass(frozen=True, slots=True)
class Asked:
    """What is asked.

    Attributes:
        numbers: Numbers,
            of any size.
        names: Names.
        only_python: A number.
    """

    numbers: tuple[int, ...] = option(
        (1,), "Numbers.", metavar="N,N", words=str | None, read=partial(whole_numbers, "--numbers")
    )
    names: tuple[str, ...] = option((), "A name; repeatable.", name="--name")
    only_python: int = 3


@dataclass(frozen=True, slots=True)
class Shown(Asked):
    FIRST = ("json", "names")

    json: bool = in_output(False, "Print JSON.")


def test_an_option_is_a_field_of_the_request() -> None:
    options = offered(Shown)
    assert [(name, offer.name) for name, offer in options.items()] == [
        ("json", "--json"),
        ("names", "--name"),
        ("numbers", "--numbers"),
    ]
    assert offered(LoaderRequest)["pin_memory"].name == "--pin-memory/--no-pin-memory"
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


@verb(Shown, without=("json",))
def asked(what: str, *, request: Shown, gpu: str = "t4", **settings: Any) -> tuple[str, Shown, str, dict[str, Any]]:
    """Ask.

    Args:
        what: Something.
        request: How.
        gpu: The GPU.
        **settings: The rest.
    """
    return what, request, gpu, settings


def test_a_verb_takes_the_fields_of_its_request_as_keywords() -> None:
    keywords = inspect.signature(asked).parameters
    assert list(keywords) == ["what", "numbers", "names", "only_python", "request", "gpu", "settings"]
    assert keywords["numbers"].default == (1,) and str(keywords["numbers"].annotation).endswith("Sequence[int] | str")
    assert (inspect.getdoc(asked) or "").splitlines()[3:] == [
        "    what: Something.",
        "    numbers: Numbers,",
        "        of any size.",
        "    names: Names.",
        "    only_python: A number.",
        "    request: A whole ``Shown``, in place of its fields.",
        "    gpu: The GPU.",
        "    **settings: The rest.",
    ]
    assert asked("it", numbers=[2, 3], bf16=True) == ("it", Shown(numbers=(2, 3)), "t4", {"bf16": True})
    assert asked("it", numbers="4, 5", names=["a"])[1] == Shown(numbers=(4, 5), names=("a",))
    assert asked("it", json=True)[3] == {"json": True}
    assert asked("it", request=Shown(names=("a",)), gpu="a100") == ("it", Shown(names=("a",)), "a100", {})
    with pytest.raises(WorkloadError, match="json: this is no option of what was called"):
        asked("it", request=Shown(json=True))


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
