"""Learn the rules for contiguous convolutions: writes src/trainatomy/catalog/cudnn_rules.json.

python benchmarks/cudnn/learned_rules.py [--check]                                              (with scikit-learn)

The calls are those that an H200's handle answered (``missing_engines.py``). Each is labelled with the method whose
bytes are those of the answer (``learned.bytes_of``): the usual one where several are, the nearest where none is. A
decision tree of each operation, type and form of filter then tells methods apart by sizes of the call.

``--check`` learns without the configurations that are held out and without a fifth of the calls of the twenty networks,
and prints how often the trees, and the rules without them, miss a workspace by more than 2 % and 1 MiB.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from handle_answers import answers_in, transposed
from missing_engines import DRAWN, HERE
from network_calls import as_convolution

from trainatomy.operators.allocation.cudnn import by_hand
from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
from trainatomy.operators.allocation.cudnn.learned import FILE, bytes_of, group_of, is_learned, sizes_of

ANSWERS = {
    **DRAWN,
    "records/answers-transposed-h200.jsonl.gz": lambda about: transposed(about["count"], about["seed"]),
}
"""Files of answers, and their calls by what the file says of itself."""
OUT = HERE.parents[1] / "src" / "trainatomy" / "catalog" / FILE
TILES = ("128x128", "128x64", "256x128", "256x64", "64x64", "128x256", "64x128", "64x256")
CLUSTERS = (
    "1x1",
    "1x2",
    "2x1",
    "2x2",
    "1x3",
    "3x1",
    "1x4",
    "4x1",
    "2x4",
    "4x2",
    "8x1",
    "1x8",
    "1x5",
    "5x1",
    "1x6",
    "7x1",
)
METHODS = (
    "none", "copies", "data+weight", "weight+output", "unpadded", "unpadded-data",
    *(f"divided {tile} {cluster}" for tile in TILES for cluster in CLUSTERS),
)  # fmt: skip
OF_WEIGHT = (
    "images", *(f"parts {tile} {rounds}" for tile in ("128x256", "64x64", "32x32", "128x64") for rounds in (1, 2, 4))
)  # fmt: skip
CLOSE, CLOSE_SHARE = 4096, 0.001
"""Bytes, and share, that a workspace may differ by."""
FEWEST = 5
"""Calls of a method that is learned, at least."""
HEAVY = 2**22
"""Bytes of a workspace that counts twice; those of 64 MiB and more count as much as one of 64 MiB."""
MISSED, MISSED_SHARE = 2**20, 0.02
SOURCE = (
    "Methods of cuDNN 9.19.0 (torch 2.11) on an H200 by sizes of a call: [size, limit, up to the limit, above]. The "
    "sizes are those of learned.sizes_of. Learned by benchmarks/cudnn/learned_rules.py from {calls} calls."
)


@dataclass(frozen=True)
class Answer:
    """A call and the workspace that a GPU answered; ``part``: ``learned``, ``held out`` or ``other calls``."""

    part: str
    kind: Kind
    one: Convolution
    bytes: int

    @cached_property
    def by_method(self) -> dict[str, int]:
        """The bytes of each method; those that divide nothing are left out."""
        methods = METHODS + (OF_WEIGHT if self.kind == "weight gradient" else ())
        every = {method: bytes_of(method, self.kind, self.one) for method in (*methods, *self._winograd)}
        plain = every["copies"]
        return {name: size for name, size in every.items() if name == "copies" or " " not in name or size > plain + 131}

    @property
    def _winograd(self) -> tuple[str, ...]:
        usual = tuple(self.one.weight[2:]) == (3, 3) and max(self.one.strides) == max(self.one.dilation) == 1
        return ("winograd", "winograd 16") if usual else ()

    @cached_property
    def methods(self) -> frozenset[str]:
        """The methods whose bytes are the answer."""
        slack = max(CLOSE, CLOSE_SHARE * self.bytes)
        return frozenset(name for name, size in self.by_method.items() if abs(size - self.bytes) <= slack)

    def is_missed(self, found: int) -> bool:
        """Return whether a workspace is far from the answer."""
        return abs(found - self.bytes) > max(MISSED, MISSED_SHARE * max(found, self.bytes))


def answers() -> Iterator[Answer]:
    """Yield each call once."""
    seen = set()
    for file, calls_by in ANSWERS.items():
        about, found = answers_in([HERE / file])
        every = calls_by(about)
        for number, (text, size, *_) in found.items():
            call = every[number]
            one = as_convolution(call)
            if text and is_learned(call["kind"], one) and (call["kind"], one.key) not in seen:
                seen.add((call["kind"], one.key))
                part = "held out" if call["side"] == "held out" else "learned"
                is_fifth = int(hashlib.md5(str(call).encode()).hexdigest(), 16) % 5 == 0
                yield Answer("other calls" if "twenty" in file and is_fifth else part, call["kind"], one, size)


def usual_methods(of: Sequence[Answer]) -> list[str]:
    """Return methods that together explain the answers, the one of most calls first."""
    order, left = [], [each.methods for each in of if each.methods]
    while left:
        method, count = min(
            Counter(name for each in left for name in each).items(), key=lambda item: (-item[1], item[0])
        )
        if count < FEWEST:
            break
        order.append(method)
        left = [each for each in left if method not in each]
    return order or ["none"]


def label_of(each: Answer, order: Sequence[str]) -> str:
    """Return the method that stands for an answer."""
    exact = next((method for method in order if method in each.methods), None)
    return exact or min((m for m in order if m in each.by_method), key=lambda m: abs(each.by_method[m] - each.bytes))


def tree_of(of: Sequence[Answer]) -> Any:
    """Return the tree of a group, as lists."""
    from sklearn.tree import DecisionTreeClassifier

    order = [*usual_methods(of), "none"]
    learner = DecisionTreeClassifier(random_state=0)
    weights = [1 + min(each.bytes, 16 * HEAVY) / HEAVY for each in of]
    learner.fit([sizes_of(each.one) for each in of], [label_of(each, order) for each in of], sample_weight=weights)
    return _as_lists(learner.tree_, [str(name) for name in learner.classes_], 0)


def _as_lists(tree: Any, names: Sequence[str], node: int) -> Any:
    """Return a node: a method, or a size, its limit and the nodes on either side."""
    if tree.children_left[node] < 0:
        return names[int(tree.value[node][0].argmax())]
    below, above = (_as_lists(tree, names, side[node]) for side in (tree.children_left, tree.children_right))
    if below == above:
        return below
    return [int(tree.feature[node]), float(f"{tree.threshold[node]:.9g}"), below, above]


def found_by(tree: Any, each: Answer) -> int:
    """Return the workspace that a tree finds."""
    values = sizes_of(each.one)
    while not isinstance(tree, str):
        size, limit, below, above = tree
        tree = below if values[size] <= limit else above
    return bytes_of(tree, each.kind, each.one)


def check(groups: dict[tuple[Kind, str], list[Answer]]) -> None:
    """Print how often trees, and the rules without them, miss calls that nothing was learned from."""
    counts: Counter[tuple[str, str]] = Counter()
    for of in groups.values():
        tree = tree_of([each for each in of if each.part == "learned"])
        for each in of:
            if each.part != "learned":
                counts[each.part, "calls"] += 1
                counts[each.part, "trees"] += each.is_missed(found_by(tree, each))
                counts[each.part, "rules"] += each.is_missed(by_hand(each.kind, each.one))
    for part in ("held out", "other calls"):
        calls, trees, rules = (counts[part, name] for name in ("calls", "trees", "rules"))
        print(
            f"{part}: {calls} calls, missed by trees {trees / calls:.1%}, by the rules without them {rules / calls:.1%}"
        )


def main() -> int:
    """Write the trees."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="print how often trees miss calls, and write nothing")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    groups: dict[tuple[Kind, str], list[Answer]] = defaultdict(list)
    for each in answers():
        groups[each.kind, group_of(each.one)].append(each)
    if options.check:
        check(groups)
        return 0
    trees: dict[str, dict[str, Any]] = defaultdict(dict)
    for (kind, group), of in sorted(groups.items()):
        trees[kind][group] = tree_of(of)
    source = SOURCE.format(calls=f"{sum(map(len, groups.values())):,}")
    text = json.dumps({"source": source, "trees": trees}, separators=(",", ":"))
    options.out.write_text(
        text.replace('"trees"', '\n"trees"').replace('"other, ', '\n"other, ') + "\n", encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
