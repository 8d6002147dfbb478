"""How cuDNN convolves groups of images, and by which plans: ask its library, learn the trees that stand in for it.

python benchmarks/cudnn/group_ways.py ask --out FILE [--seed 1] [--count 20000]                  (with cuDNN's library)
python benchmarks/cudnn/group_ways.py learn FILE... [--check]                                      (with scikit-learn)
python benchmarks/cudnn/group_ways.py label CALIBRATION...                                       (with cuDNN's library)

``ask`` draws convolutions of groups (layers of published networks, random ones, those of calibrations) and writes how
cuDNN convolves each on an H200; the calls follow from the seed.  ``learn`` writes the trees of
``src/trainatomy/catalog/cudnn_groups.json``; with ``--check`` it learns without the configurations that are held out,
says how many of these the trees have right, and writes nothing.  ``label`` adds to the convolutions of a calibration
by which plans and in which ways they were computed.  No GPU is needed.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import handle_answers
from network_calls import as_convolution

from trainatomy.catalog.calls import from_text, to_text
from trainatomy.catalog.gpus import find_gpu
from trainatomy.measurement.calibration import drawn_convolutions, drawn_others
from trainatomy.operators.allocation.cudnn.ways import say_plans, way_of
from trainatomy.operators.cost import plans
from trainatomy.operators.cost.ways import ARGUMENT, FILE, TOGETHER, Sizes, form_of, sizes_compared
from trainatomy.simulator.cudnn import installed_heuristics

CATALOG = Path(__file__).parents[2] / "src" / "trainatomy" / "catalog" / FILE
GPU = "h200"
KINDS = ("grouped", "wide groups", "published groups")
LARGEST = 2**31
FEWEST, COST = 4, 5e-5
"""Calls of a leaf at least; share of the calls of a tree that a branch has to put right."""
Call = dict[str, Any]


def _of_calibrations(seed: int) -> Iterator[Call]:
    """Yield convolutions of groups as calibrations draw them, without end."""
    random = Random(f"groups {seed}")
    while True:
        dtype, kind = random.choice(handle_answers.TYPES), random.choice((*KINDS, "usual", "usual", "usual"))
        if kind == "usual":
            shape = drawn_others.usual_groups(random).make.args[0]  # type: ignore[attr-defined]
        else:
            shape = drawn_convolutions._DRAWS[kind](random)
        stride = shape.stride if isinstance(shape.stride, tuple) else (shape.stride,) * 2
        after = [
            (size + 2 * pad - shape.dilation * (taps - 1) - 1) // step + 1
            for size, pad, taps, step in zip(shape.image[2:], shape.padding, shape.weight[2:], stride, strict=True)
        ]
        layer = [
            list(shape.image[1:]), list(shape.weight), [shape.weight[0], *after], list(stride), list(shape.padding),
            [shape.dilation] * 2, shape.groups, False,
        ]  # fmt: skip
        side = handle_answers.side_of(f"{shape.weight}{shape.image}")
        for kind in handle_answers.KINDS:
            yield handle_answers._call(kind, dtype, shape.image[0], layer, shape.channels_last) | {"side": side}


def drawn(seed: int) -> Iterator[Call]:
    """Yield convolutions of groups of images without end: published, random, and as calibrations draw them in turn."""
    sources = handle_answers.published(seed), handle_answers.invented(seed), _of_calibrations(seed)
    while True:
        for source in sources:
            call = next(source)
            large = max(math.prod(call["data"]), math.prod(call["output"])) > LARGEST
            groups = call["groups"] > 1 < call["weight"][1] and math.prod(call["weight"][2:]) > 1
            if groups and not large and not call["transposed"] and len(call["data"]) > 3:
                yield call


def ask(out: Path, seed: int, count: int) -> None:
    """Write the ways of drawn calls."""
    heuristics = installed_heuristics(find_gpu(GPU))
    if heuristics is None:
        raise SystemExit("cuDNN's library is not installed")
    calls, ways = drawn(seed), []
    for _ in range(count):
        call = next(calls)
        one = as_convolution(call)
        plan = heuristics.plan(call["kind"], one, tf32=True, deterministic=False)
        ways.append((way_of(call["kind"], one, plan) if plan else None) or "")
    about = {"seed": seed, "count": count, "gpu": GPU, "cudnn": heuristics.version}
    with gzip.GzipFile(out, "wb", mtime=0) as file:
        file.write((json.dumps(about) + "\n" + json.dumps(ways) + "\n").encode())


def answers(files: list[Path]) -> Iterator[tuple[Call, str]]:
    """Yield the answered calls of files, each once."""
    seen = set()
    for file in files:
        about, ways = (json.loads(line) for line in gzip.decompress(file.read_bytes()).decode().splitlines())
        for call, way in zip(drawn(about["seed"]), ways, strict=False):
            key = json.dumps({name: value for name, value in call.items() if name != "side"})
            if way and key not in seen:
                seen.add(key)
                yield call, way


def _sizes(call: Call) -> Sizes:
    shapes = {name: tuple(call[name]) for name in ("data", "weight", "output", "strides", "padding", "dilation")}
    return Sizes(**shapes, groups=call["groups"], dtype=call["dtype"], transposed=False, last=bool(call["last"]))


def learn(files: list[Path], check: bool) -> None:
    """Learn the trees, and write them unless they are checked."""
    import numpy
    from sklearn.tree import DecisionTreeClassifier

    by_form: dict[str, list[tuple[tuple[float, ...], str, str]]] = defaultdict(list)
    for call, way in answers(files):
        one = _sizes(call)
        by_form[f"{call['kind']}, {form_of(one)}"].append((sizes_compared(one), way, call["side"]))
    trees, right, judged, together = {}, 0, 0, 0
    for form, rows in sorted(by_form.items()):
        used = [row for row in rows if not check or row[2] != "held out"]
        values = numpy.array([row[0] for row in used], dtype=float)
        found = DecisionTreeClassifier(min_samples_leaf=FEWEST, ccp_alpha=COST, random_state=0)
        found.fit(values, [row[1] for row in used])
        trees[form] = _node(found, 0)
        if check and (others := [row for row in rows if row[2] == "held out"]):
            told = found.predict(numpy.array([row[0] for row in others], dtype=float))
            hits = sum(map(str.__eq__, told, (row[1] for row in others)))
            right, judged = right + hits, judged + len(others)
            together += sum(row[1] == TOGETHER for row in others)
            print(f"{form}: {len(used)} learned, {hits} of {len(others)} right, {Counter(row[1] for row in rows)}")
    calls = sum(map(len, by_form.values()))
    if check:
        print(f"{right} of {judged} held-out calls right ({right / judged:.1%}); together: {together / judged:.1%}")
        return
    known = json.loads(CATALOG.read_text(encoding="utf-8"))
    source = (
        "How cuDNN 9.19.0 convolves groups of images on an H200, by its library's answers: the engines by what kernels "
        "a profiler saw of them on an H200 and an H100, and a tree of sizes for each product: [size, limit, up to the "
        f"limit, above]. Learned by benchmarks/cudnn/group_ways.py from {calls} calls."
    )
    content = {"source": source, "engines": known["engines"], "trees": trees}
    CATALOG.write_text(json.dumps(content, separators=(",", ":")) + "\n", encoding="utf-8")


def _node(found: Any, index: int) -> Any:
    """Return a node of a tree: a way, or a size, its limit and the nodes below and above."""
    tree = found.tree_
    if tree.children_left[index] < 0:
        return str(found.classes_[int(tree.value[index][0].argmax())])
    below, above = _node(found, tree.children_left[index]), _node(found, tree.children_right[index])
    limit = float(tree.threshold[index])
    rounded = int(limit) if limit > 1e4 else round(limit, 2)
    return below if below == above else [int(tree.feature[index]), rounded, below, above]


def label(path: Path) -> None:
    """Add plans, and the ways of groups, to the convolutions of a calibration."""
    files = sorted(path.glob("convolution*.json")) if path.is_dir() else [path]
    gpu = find_gpu(path.name.removesuffix(".json"))
    heuristics = installed_heuristics(gpu)
    if heuristics is None:
        raise SystemExit("cuDNN's library is not installed")

    def labelled(found: re.Match[str]) -> str:
        calls = [from_text(re.sub(rf";({ARGUMENT}|{plans.ARGUMENT})=[^;]+", "", json.loads(found.group())))]
        say_plans(calls, heuristics, gpu.capability, tf32=True, deterministic=False)
        return json.dumps(to_text(calls[0]))

    for file in files:
        text = file.read_text(encoding="utf-8")
        file.write_text(re.sub(r'"aten::convolution[^"]*"', labelled, text), encoding="utf-8")


def main() -> int:
    """Ask, learn or label."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    asking = commands.add_parser("ask")
    asking.add_argument("--out", type=Path, required=True)
    asking.add_argument("--seed", type=int, default=1)
    asking.add_argument("--count", type=int, default=20_000)
    learning = commands.add_parser("learn")
    learning.add_argument("files", type=Path, nargs="+")
    learning.add_argument("--check", action="store_true")
    labelling = commands.add_parser("label")
    labelling.add_argument("calibrations", type=Path, nargs="+")
    options = parser.parse_args()
    if options.command == "ask":
        ask(options.out, options.seed, options.count)
    elif options.command == "learn":
        learn(options.files, options.check)
    else:
        for path in options.calibrations:
            label(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
