"""Generated pages are up to date, links and commands in the documentation work, and every option has help."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
from concepts.context import FP32, HALF
from jinja2 import UndefinedError

from trainatomy.catalog.gpus import find_gpu
from trainatomy.cli.app import COMMANDS, load
from trainatomy.workload.overrides import FLAGS

ROOT = Path(__file__).parents[2]
MIB = 1024**2
CHECKED = {
    ("fp32", "foreach adamw"): ("a training in fp32", FP32),
    ("fp32", "cudnn attention"): ("with attention by cuDNN", HALF),
    ("images", "conv fp32"): (
        "convolutions, forward and backward",
        ("kernels", "cudnn", "cudnn_backward", "convolution"),
    ),
    ("images", "conv bf16"): ("convolutions and products", (*HALF, "convolution")),
    ("inference", "conv inference"): (
        "inference: products and convolutions",
        ("kernels", "cublas", "cudnn", "convolution"),
    ),
    ("bf16", "backward addmm bf16"): (
        "products in 16 bits, forward and backward",
        ("kernels", "cublas", "cublas_backward"),
    ),
}
"""Stages of the probe, with their descriptions and the libraries in use by then (keys of the GPU catalog)."""


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate_docs", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow  # `make check` runs the same
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


def pages() -> list[Path]:
    """Return every page of the repository that a reader opens."""
    return [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def test_links_between_pages_work() -> None:
    for page in pages():
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_absolute_links_into_the_repository_work() -> None:
    pattern = r"https://(?:github\.com|raw\.githubusercontent\.com)/trainatomy/trainatomy/(?:blob/)?main/([^)#\s]+)"
    linked = re.findall(pattern, (ROOT / "README.md").read_text("utf-8"))
    assert len(linked) > 10
    assert [path for path in linked if not (ROOT / path).exists()] == []


def test_the_readme_fits_80_columns_but_for_tables_links_and_code() -> None:
    text = re.sub(r"```python.*?```", "", (ROOT / "README.md").read_text("utf-8"), flags=re.DOTALL)
    wide = [line for line in text.splitlines() if len(line) > 80 and not re.match(r"[|!]|\[\w+\]: ", line)]
    assert wide == []


def test_the_json_keys_that_the_page_names_are_in_the_schema(generate: ModuleType) -> None:
    from trainatomy.reporters.json import FORMATS
    from trainatomy.reporters.schema import schema_of

    schema = schema_of(FORMATS["prediction"])
    page = (ROOT / "docs" / "json.md").read_text("utf-8")
    section = page.partition("## A prediction")[2].partition("## A comparison")[0]
    for name in re.findall(r"^- `([\w.]+)`", section, re.MULTILINE):
        here = schema
        for key in name.split("."):
            here = schema["$defs"][here["$ref"].rpartition("/")[2]] if "$ref" in here else here
            assert key in here["properties"], name
            here = here["properties"][key]


def written_commands() -> list[str]:
    """Return every ``trainatomy …`` command of the Makefile, console blocks and examples for CI, with lines joined."""
    found = re.findall(r"^\t@?\$\(BIN\)/(trainatomy .+)$", joined(ROOT / "Makefile"), re.MULTILINE)
    for page in pages():
        for block in re.findall(r"```console\n(.*?)```", joined(page), re.DOTALL):
            found += re.findall(r"^\$ (?:\.venv/bin/)?(trainatomy .+)$", block, re.MULTILINE)
        for block in re.findall(r"```yaml\n(.*?)```", joined(page), re.DOTALL):
            found += re.findall(r"^ *(?:- )?(?:run|entry): (trainatomy .+)$", block, re.MULTILINE)
    return found


def joined(file: Path) -> str:
    return re.sub(r"\\\n\s*", "", file.read_text("utf-8"))


@pytest.mark.parametrize("line", written_commands())
def test_documented_commands_are_valid(line: str) -> None:
    words = list(itertools.takewhile(lambda word: word not in ("|", ">", "#"), shlex.split(line, comments=True)))
    command = next((word for word in words[1:] if not word.startswith("-")), None)
    if command is not None:
        load(command).make_context(command, words[words.index(command) + 1 :])


@pytest.mark.parametrize("name", ["h200", "h100-sxm"])
def test_contexts_of_measured_gpus_match_the_probe(name: str) -> None:
    from concepts.context import probe

    found, context = probe(name), find_gpu(name).context()
    assert found["environment"]["gpu"] == find_gpu(name).device_name
    assert found["idle_bytes"] == find_gpu(name).driver_reserved_bytes
    source = find_gpu(name).source("contexts.lazy.first_tensor_bytes")
    for key in ("driver", "torch", "date"):
        assert found["environment"][key] in source
    for (sequence, stage), (what, libraries) in CHECKED.items():
        read = dict(found["sequences"][sequence])
        assert read["tensor"] == context.first_tensor_bytes
        assert abs(context.holding(libraries) - read[stage]) <= 2 * MIB, what  # the driver's granularity


def test_unmeasured_gpus_are_marked() -> None:
    from concepts.context import basis

    from trainatomy.catalog.gpus import gpus

    measured = {one.id for one in gpus() if "measured" in basis(one)}
    probed = {file.stem for file in (ROOT / "lab" / "context").glob("*.json")}
    assert measured == probed
    for one in gpus():
        assert (one.id in measured) == (not one.source("contexts.lazy.first_tensor_bytes").startswith("assumed"))


def test_the_figures_of_the_drawn_run_nest_to_the_byte() -> None:
    from concepts.context import RUN, alone, figures, outside, records, shortfall

    run = next(row for row in records("h200-held-out") if row["name"] == RUN)
    sizes = [size for _, _, size, _ in figures(run)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[1] == find_gpu("h200").driver_reserved_bytes
    assert sizes[1] - sizes[3] == outside(run) == find_gpu("h200").context().holding(FP32)
    assert {row["device_bytes"] - row["process_bytes"] for row in alone()} == {shortfall()}


@pytest.mark.parametrize("name", ["accuracy.md", "context.md", "time.md"])
def test_concept_pages_contain_none_of_our_numbers(name: str) -> None:
    """Check that all numbers in the text were published by others (PyTorch, NVIDIA) or are sizes of units."""
    allowed = {"2 MiB", "32 MiB", "640 MiB", "0 MB", "16 GB", "16,160", "287,047,680", "666,632,192"}
    allowed |= {"0.00 %", "0.005 %", "80 GB", "80 GiB"}  # what is called exact, and sizes of GPUs
    text = re.sub(r"\{[{%].*?[%}]\}", "", (ROOT / "docs" / "concepts" / f"{name}.jinja").read_text("utf-8"))
    typed = re.findall(r"\d{1,3}(?:,\d{3})+|\d[\d.]* (?:[KMG]i?B|[mµ]s|%|TFLOP|TB)\b", text)
    assert set(typed) <= allowed


def test_a_name_without_a_value_is_an_error() -> None:
    from concepts.page import page

    with pytest.raises(UndefinedError):
        page("context.md", {})


def test_drawings_are_xml_and_stay_within_their_size() -> None:
    from xml.etree import ElementTree

    for name in ("context.svg", "clocks.svg", "roofline.svg"):
        root = ElementTree.parse(ROOT / "docs" / name).getroot()
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        for shape in root.iter("{http://www.w3.org/2000/svg}rect"):
            right = float(shape.get("x", 0)) + float(shape.attrib["width"])
            low = float(shape.get("y", 0)) + float(shape.attrib["height"])
            assert right <= width and low <= height
