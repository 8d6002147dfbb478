"""Learn the rules for convolutions: writes src/trainatomy/catalog/cudnn_rules.json.

python benchmarks/cudnn/learned_rules.py [--check]                                              (with scikit-learn)

The calls are those that an H200's handle answered (``missing_engines.py``), and those of drawn trainings of the twenty
networks that cuDNN's library answered (``library_answers.py``). Each is labelled with its method
(``methods.bytes_of``): that of its plan, if that gives the bytes of the answer, else another one that gives them, else
the nearest. A decision tree of each operation, type, layout and form of filter then tells methods apart by sizes of the
call. Branches of a tree that do not pay are cut off again: those whose methods need about the same bytes, as a share of
what their training needs.

``--check`` learns without the configurations that are held out and without one of twelve trainings, and prints how
often the trees, and the rules without them, miss a workspace by more than 2 % and 1 MiB. With ``--without FILE`` the
drawn trainings of a file of cases are left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from handle_answers import answers_in, transposed
from library_answers import answered
from missing_engines import DRAWN, HERE
from network_calls import as_convolution

from trainatomy.operators.allocation.cudnn import by_hand
from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
from trainatomy.operators.allocation.cudnn.divided import _ENGINES, _TILES
from trainatomy.operators.allocation.cudnn.grouped import padded
from trainatomy.operators.allocation.cudnn.learned import FILE, group_of, sizes_of
from trainatomy.operators.allocation.cudnn.methods import BY_HAND, bytes_of
from trainatomy.operators.allocation.cudnn.missing import _contents as missing
from trainatomy.operators.allocation.cudnn.weight_gradient import transformed

ANSWERS = {
    **DRAWN,
    "records/answers-transposed-h200.jsonl.gz": lambda about: transposed(about["count"], about["seed"]),
}
"""Files of a handle's answers, and their calls by what the file says of itself."""
OF_LIBRARY = ("records/answers-library-h200.jsonl.gz", "records/answers-library-last-h200.jsonl.gz")
OUT = HERE.parents[1] / "src" / "trainatomy" / "catalog" / FILE
SIMPLE = ("none", "copies", "copies wide", "data+weight", "weight+output", "unpadded", "unpadded-data")
OF_GROUPS = ("none", "padded", "padded wide", "by group")
OF_LAST = ("none", BY_HAND, "copies")
OF_WEIGHT = (
    "images", *(f"parts {tile} {rounds}" for tile in ("128x256", "64x64", "32x32", "128x64") for rounds in (1, 2, 4))
)  # fmt: skip
OF_STEM = ("stem 0", "stem 8", "stem 16")
SUM_TILES = ("128x128", "64x64", "32x128", "128x64")
SPLIT, SPLIT_BUFFERS, TILE, WORKSPACE, CLUSTER = "0", "12", "2", "25", ("27", "28")
"""Knobs of a plan, by ``cudnnBackendKnobType_t``."""
CLOSE, CLOSE_SHARE, CLOSE_SHARE_OF_SUMS = 4096, 0.001, 0.003
"""Bytes, and share, that a workspace may differ by."""
MISSED, MISSED_SHARE = 2**20, 0.02
HEAVY, LIGHTEST = 0.1, 0.01
"""Share of a training's activations from which a workspace has full weight, and the least weight."""
OF_OTHERS, OTHERS_ACTIVATIONS = 0.3, 10
"""Weight of calls whose training is not known, and its activations: as a multiple of the workspace."""
NO_MATTER, WORST_SHARE, LEAST_GAIN = 2**16, 0.02, 0.02
"""Bytes that cost nothing; share of the activations that costs 1, the most; cost that a branch saves at least."""
SMALL = 2**28
"""Activations below which a training counts half."""
SOURCE = (
    "Methods of cuDNN 9.19.0 (torch 2.11) on an H200 by sizes of a call: [size, limit, up to the limit, above]; "
    "methods are numbers in the list. The sizes are those of learned.sizes_of. Learned by "
    "benchmarks/cudnn/learned_rules.py from {calls} calls."
)
HELD_OUT_TRAININGS = 12


@dataclass(frozen=True)
class Answer:
    """A call and its workspace.

    Attributes:
        part: ``learned``, ``held out`` (of other networks) or ``trainings`` (of the twenty), for ``--check``.
        kind: Operation.
        one: The call.
        bytes: Workspace.
        method: The method that stands for it.
        activations: Bytes of the activations of its training.
        weight: Weight in learning.
    """

    part: str
    kind: Kind
    one: Convolution
    bytes: int
    method: str
    activations: float
    weight: float

    def is_missed(self, found: int) -> bool:
        """Return whether a workspace is far from the answer."""
        return abs(found - self.bytes) > max(MISSED, MISSED_SHARE * max(found, self.bytes))


def is_close(found: int | None, size: int, share: float = CLOSE_SHARE) -> bool:
    """Return whether a method gives an answer."""
    return found is not None and abs(found - size) <= max(CLOSE, share * size)


def of_plan(kind: Kind, one: Convolution, plan: str) -> Iterator[tuple[str, float]]:
    """Yield the methods that a plan may stand for, each with the share that its bytes may differ by."""
    engine, *settings = plan.split(" ")
    knobs = {name: int(value) for name, value in (text.split("=") for text in settings if "=" in text)}
    if kind == "weight gradient" and knobs.get(SPLIT, 0) > 0:
        yield f"split {knobs[SPLIT]}", CLOSE_SHARE
    if SPLIT_BUFFERS in knobs and one.groups == 1:
        buffers = max(knobs[SPLIT_BUFFERS], 1)
        for count in {buffers, buffers - 1} - {0}:
            yield from ((f"sums {count} {tile}", CLOSE_SHARE_OF_SUMS) for tile in SUM_TILES)
    if engine.isdigit() and int(engine) in _ENGINES and knobs.get(WORKSPACE) == 0 and CLUSTER[0] in knobs:
        tile = _TILES.get(knobs.get(TILE, -1))
        if tile:
            cluster = "x".join(str(knobs[name]) for name in CLUSTER)
            yield f"divided {tile[0]}x{tile[1]} {cluster}", CLOSE_SHARE


def others(kind: Kind, one: Convolution) -> Iterator[str]:
    """Yield the methods that an answer may have apart from its plan."""
    if one.channels_last:
        yield from OF_LAST
        return
    yield from OF_GROUPS if one.groups > 1 else SIMPLE
    if kind == "weight gradient" and one.groups == 1:
        yield from OF_WEIGHT


def nearest(kind: Kind, one: Convolution) -> Iterator[str]:
    """Yield the methods that stand for an answer that none gives."""
    if one.channels_last:
        yield from (*OF_LAST, "data+weight", "weight+output", "unpadded", "unpadded-data")
    elif one.groups > 1:
        yield from (*OF_GROUPS, BY_HAND, "unpadded")
    else:
        yield from (*SIMPLE, BY_HAND, "copies twice")
        yield from OF_STEM if one.is_stem and one.is_half else ()
        yield from OF_WEIGHT if kind == "weight gradient" else ()


def size_of(method: str, kind: Kind, one: Convolution) -> int:
    """Return the bytes of a method, those by hand where it has none."""
    size = bytes_of(method, kind, one)
    return by_hand(kind, one) if size is None else size


def method_of(kind: Kind, one: Convolution, size: int, plan: str, engine: int) -> str:
    """Return the method that stands for an answer."""
    if engine and bytes_of(f"engine {engine}", kind, one) is not None:
        candidates = [(f"engine {engine}", CLOSE_SHARE)]
    else:
        candidates = list(of_plan(kind, one, plan))
    candidates += [(name, CLOSE_SHARE) for name in others(kind, one)]
    for name, share in candidates:
        if is_close(size_of(name, kind, one) if name == BY_HAND else bytes_of(name, kind, one), size, share):
            return name
    return min(nearest(kind, one), key=lambda name: abs(size_of(name, kind, one) - size))


def largest_of(one: Convolution, size: int) -> int:
    """Return the larger one of a workspace and of the copies that other engines would need."""
    if one.channels_last:
        return size
    return max(size, padded(one) if one.groups > 1 and one.channels > 1 else transformed(one))


def of_handle() -> Iterator[Answer]:
    """Yield the calls that an H200's handle answered, each once."""
    seen = set()
    for file, calls_by in ANSWERS.items():
        about, found = answers_in([HERE / file])
        every = calls_by(about)
        for number, (text, size, *_) in found.items():
            call = every[number]
            one, kind = as_convolution(call), call["kind"]
            if not text or (kind, one.key) in seen:
                continue
            seen.add((kind, one.key))
            name = text.split(" ")[0]
            method = method_of(kind, one, size, text, int(name) if name in missing()["methods"][kind] else 0)
            largest = largest_of(one, size)
            weight = LIGHTEST / 2 + OF_OTHERS * min(1, largest / 2**24)
            part = "held out" if call["side"] == "held out" else "learned"
            yield Answer(part, kind, one, size, method, OTHERS_ACTIVATIONS * max(largest, MISSED), weight)


def of_library(without: set[tuple[str, int, int]]) -> Iterator[Answer]:
    """Yield the calls that the library answered."""
    for file in OF_LIBRARY:
        for training, call, plan, size, engine in answered(HERE / file):
            if (training.network, training.side, training.batch) in without:
                continue
            one, kind = as_convolution(call), call["kind"]
            method = method_of(kind, one, size, plan, engine)
            weight = LIGHTEST + min(1, largest_of(one, size) / training.activations / HEAVY)
            number = int(hashlib.md5(str(tuple(training)).encode()).hexdigest(), 16)
            part = "learned" if number % HELD_OUT_TRAININGS else "trainings"
            yield Answer(part, kind, one, size, method, training.activations, weight)


Rows = Any
"""Numbers of answers, as an array."""


class Tree:
    """The tree of a group, whose branches are cut where they do not pay."""

    def __init__(self, of: Sequence[Answer]) -> None:
        """Learn."""
        import numpy
        from sklearn.tree import DecisionTreeClassifier

        self._of, self._costs = of, dict[tuple[int, str], float]()
        self._sizes = numpy.array([sizes_of(each.one) for each in of], dtype=numpy.float32)
        learner = DecisionTreeClassifier(random_state=0)
        learner.fit(self._sizes, [each.method for each in of], sample_weight=[each.weight for each in of])
        self._learned, self._names = learner.tree_, [str(name) for name in learner.classes_]
        self.root, _ = self._node(0, numpy.arange(len(of)))

    def _node(self, number: int, rows: Rows) -> tuple[Any, float]:
        """Return a node, as a method or a list of size, limit and both sides, and what it costs."""
        tree = self._learned
        if tree.children_left[number] < 0:
            method = self._names[int(tree.value[number][0].argmax())]
            return method, self._cost(method, rows)
        size, limit = int(tree.feature[number]), float(tree.threshold[number])
        is_below = self._sizes[rows, size] <= limit
        below, cost_below = self._node(tree.children_left[number], rows[is_below])
        above, cost_above = self._node(tree.children_right[number], rows[~is_below])
        cost = cost_below + cost_above
        if isinstance(below, str) and isinstance(above, str):
            cut, method = min((self._cost(method, rows), method) for method in (below, above))
            if cut <= cost + LEAST_GAIN:
                return method, cut
        return [size, float(f"{limit:.9g}"), below, above], cost

    def _cost(self, method: str, rows: Rows) -> float:
        return sum(self._cost_of(int(row), method) for row in rows)

    def _cost_of(self, row: int, method: str) -> float:
        if (row, method) not in self._costs:
            each = self._of[row]
            error = abs(size_of(method, each.kind, each.one) - each.bytes)
            share = min(1.0, error / each.activations / WORST_SHARE) if error >= NO_MATTER else 0.0
            self._costs[row, method] = share * (1 if each.activations > SMALL else 0.5)
        return self._costs[row, method]


def found_by(tree: Any, each: Answer) -> int:
    """Return the workspace that a tree finds."""
    values = sizes_of(each.one)
    while not isinstance(tree, str):
        size, limit, below, above = tree
        tree = below if values[size] <= limit else above
    return size_of(tree, each.kind, each.one)


def check(groups: dict[tuple[Kind, str], list[Answer]]) -> None:
    """Print how often trees, and the rules without them, miss calls that nothing was learned from."""
    counts: Counter[tuple[str, str, str]] = Counter()
    for (kind, group), of in sorted(groups.items()):
        learned = [each for each in of if each.part == "learned"]
        tree = Tree(learned).root if learned else BY_HAND
        for each in of:
            if each.part != "learned":
                for where in (f"{kind}, {group}", "all"):
                    counts[each.part, where, "calls"] += 1
                    counts[each.part, where, "trees"] += each.is_missed(found_by(tree, each))
                    counts[each.part, where, "rules"] += each.is_missed(by_hand(each.kind, each.one))
    for part, where in sorted({key[:2] for key in counts}):
        calls, trees, rules = (counts[part, where, name] for name in ("calls", "trees", "rules"))
        print(f"{part}: {where}: {calls} calls, missed by trees {trees / calls:.1%}, by hand {rules / calls:.1%}")


def write(trees: dict[str, dict[str, Any]], count: int, out: Path) -> None:
    """Write the trees, with numbers in place of methods."""
    numbers: dict[str, int] = {}

    def numbered(node: Any) -> Any:
        if isinstance(node, str):
            return numbers.setdefault(node, len(numbers))
        return [*node[:2], numbered(node[2]), numbered(node[3])]

    written = {kind: {group: numbered(tree) for group, tree in of.items()} for kind, of in trees.items()}
    contents = {"source": SOURCE.format(calls=f"{count:,}"), "methods": list(numbers), "trees": written}
    text = json.dumps(contents, separators=(",", ":")).replace(".0,", ",")
    for name in ("trees", "methods", *(group for of in written.values() for group in of)):
        text = text.replace(f'"{name}":', f'\n"{name}":').replace("\n\n", "\n")
    out.write_text(text + "\n", encoding="utf-8")


def trainings_in(files: Sequence[Path]) -> set[tuple[str, int, int]]:
    """Return network, size of images and batch of the trainings in files of cases."""
    found = set()
    for path in files:
        for name in yaml.safe_load(path.read_text(encoding="utf-8")):
            network, sizes, _ = name.rsplit("-", 2)
            batch, side = map(int, sizes.split("x"))
            found.add((network, side, batch))
    return found


def main() -> int:
    """Write the trees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="print how often trees miss calls, and write nothing")
    parser.add_argument("--without", type=Path, action="append", default=[], help="leave out the trainings of a file")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    groups: dict[tuple[Kind, str], list[Answer]] = defaultdict(list)
    for source in (of_handle(), of_library(trainings_in(options.without))):
        for each in source:
            groups[each.kind, group_of(each.one)].append(each)
    if options.check:
        check(groups)
        return 0
    trees: dict[str, dict[str, Any]] = defaultdict(dict)
    for (kind, group), of in sorted(groups.items()):
        trees[kind][group] = Tree(of).root
        print(f"{kind}, {group}: {len(of)} calls", flush=True)
    write(trees, sum(map(len, groups.values())), options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
