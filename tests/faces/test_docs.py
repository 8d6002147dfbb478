"""The pages that follow from the code say what the code says, and every command is described."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from trainatomy.faces.cli.app import COMMANDS, load
from trainatomy.workload.flags import FLAGS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_are_up_to_date(generate: ModuleType) -> None:
    assert generate.outdated() == [], "run `make docs`"


@pytest.mark.parametrize("name", ["predict", "compare", "measure"])
def test_every_flag_of_a_workload_is_an_option(name: str) -> None:
    options = {option for parameter in load(name).params for option in parameter.opts}
    assert {flag.option for flag in FLAGS} <= options


@pytest.mark.parametrize("name", [entry.name for entry in COMMANDS])
def test_every_option_has_help(name: str) -> None:
    silent = [
        parameter.opts
        for parameter in load(name).params
        if not parameter.help and not getattr(parameter, "hidden", False)
    ]
    assert silent == []


def test_links_between_pages_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_json_keys_that_the_page_names_are_in_the_schema(generate: ModuleType) -> None:
    from trainatomy.faces.schema import prediction_schema

    schema = prediction_schema()
    page = (ROOT / "docs" / "json.md").read_text("utf-8")
    section = page.partition("## A prediction")[2].partition("## A comparison")[0]
    for name in re.findall(r"^\| `([\w.]+)`", section, re.MULTILINE):
        here = schema
        for key in name.split("."):
            here = schema["$defs"][here["$ref"].rpartition("/")[2]] if "$ref" in here else here
            assert key in here["properties"], name
            here = here["properties"][key]


def written_commands() -> list[str]:
    """Every ``trainatomy …`` line of the Makefile and of console blocks, with its continuation lines."""
    found = re.findall(r"^\t@?\$\(BIN\)/(trainatomy .+)$", joined(ROOT / "Makefile"), re.MULTILINE)
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for block in re.findall(r"```console\n(.*?)```", joined(page), re.DOTALL):
            found += re.findall(r"^\$ (?:\.venv/bin/)?(trainatomy .+)$", block, re.MULTILINE)
    return found


def joined(file: Path) -> str:
    return re.sub(r"\\\n\s*", "", file.read_text("utf-8"))


@pytest.mark.parametrize("line", written_commands())
def test_commands_that_are_written_down_can_be_typed(line: str) -> None:
    words = list(itertools.takewhile(lambda word: word not in ("|", ">", "#"), shlex.split(line, comments=True)))
    command = next((word for word in words[1:] if not word.startswith("-")), None)
    if command is not None:
        load(command).make_context(command, words[words.index(command) + 1 :])
