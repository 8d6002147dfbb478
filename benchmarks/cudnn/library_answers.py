"""Ask cuDNN's library for the convolutions of drawn trainings of the twenty networks, as it answers for an H200.

python benchmarks/cudnn/library_answers.py layers                (records/layers-of-sizes.jsonl.gz)
python benchmarks/cudnn/library_answers.py ask --seed a --count 3000 --out FILE

``layers`` lists the convolutions of each network at images of many sizes. ``ask`` draws trainings (a network, the size
of its images, a batch, a type), half of them with images of usual size, and asks for each of their calls once. A line
holds a training and what was answered for those of its calls that no earlier one makes:
``[plan, bytes, engine that is missing without a driver]``, where plans are numbers in the list of the first line.
``--last`` asks for calls in channels-last layout.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from draw_trainings import LARGEST, NETWORKS, SIDES, USUAL_SIDES, kind_of
from handle_answers import KINDS, TYPES, Call, Layer, _call, _runs_in_cudnn
from network_calls import as_convolution
from torch import nn

from trainatomy.catalog.cudnn import device_text, level_factors
from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.allocation.convolution import workspace_bytes
from trainatomy.operators.allocation.cudnn.heuristics import Heuristics
from trainatomy.operators.allocation.cudnn.library import cudnn_library
from trainatomy.operators.allocation.cudnn.missing import missing_engine
from trainatomy.operators.allocation.plan import Processor

HERE = Path(__file__).parent
LAYERS = HERE / "records" / "layers-of-sizes.jsonl.gz"
GPU = "h200"
SIZES, SIZES_OF_SLOW = 150, 50
"""Sizes of images for each network, and for ConvNeXt, whose layers cannot be left out."""
USUAL = 0.45
"""Share of trainings at images of usual size."""
FEWEST, MOST = 2, {"clips": 12, "scenes": 18, "pictures": 110}
ROOM = 1.3
"""Pixels of a batch, as a multiple of those of the drawn trainings that are measured."""
WITHOUT_LAYERS = (
    nn.modules.batchnorm._BatchNorm, nn.LayerNorm, nn.ReLU, nn.ReLU6, nn.SiLU, nn.Hardswish, nn.Hardsigmoid,
    nn.Sigmoid, nn.GELU, nn.Dropout, nn.Linear,
)  # fmt: skip
"""Modules that leave shapes as they are, or come after the last convolution."""


class Training(NamedTuple):
    """A drawn training; ``activations``: bytes that its convolutions return."""

    network: str
    side: int
    batch: int
    dtype: str
    activations: int


def layers_of(name: str, sides: Sequence[int]) -> Iterator[tuple[int, list[Layer]]]:
    """Yield the convolutions of a network at images of some sizes, each once."""
    import networks

    with torch.device("meta"):
        network: Any = networks.network(name).to("meta").network
    if name != "convnext_tiny":
        _strip(network)
    found: dict[str, Layer] = {}

    def note(module: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        shapes = list(inputs[0].shape[1:]), list(module.weight.shape), list(output.shape[1:])
        settings = list(module.stride), list(module.padding), list(module.dilation), module.groups, False
        found.setdefault(json.dumps([*shapes, *settings]), [*shapes, *settings])

    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Conv3d):
            module.register_forward_hook(note)
    frames = (16,) if kind_of(name) == "clips" else ()
    for side in sides:
        found.clear()
        with torch.no_grad():
            network(torch.empty(2, 3, *frames, side, side, device="meta"))
        yield side, list(found.values())


def _strip(module: Any) -> None:
    for name, child in module.named_children():
        if isinstance(child, WITHOUT_LAYERS):
            setattr(module, name, nn.Identity())
        else:
            _strip(child)


def sides_of(name: str, chance: random.Random) -> list[int]:
    """Draw sizes of images for a network, the usual one among them."""
    kind = kind_of(name)
    least, most = SIDES.get(name, SIDES[kind])
    every, usual = range(least, most + 1), USUAL_SIDES.get(name, USUAL_SIDES[kind])
    count = SIZES_OF_SLOW if name == "convnext_tiny" else SIZES
    return sorted({usual, *chance.sample(every, min(count, len(every)))})


def write_layers(out: Path) -> None:
    """Write the layers of all networks."""
    chance = random.Random(5)
    with gzip.open(out, "wt", encoding="utf-8") as file:
        for name in NETWORKS:
            for side, layers in layers_of(name, sides_of(name, chance)):
                file.write(json.dumps({"network": name, "side": side, "layers": layers}) + "\n")
            print(name, flush=True)


def read_layers(path: Path = LAYERS) -> dict[str, dict[int, list[Layer]]]:
    """Return the layers by network and size of images."""
    found: dict[str, dict[int, list[Layer]]] = {}
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in map(json.loads, file):
            found.setdefault(line["network"], {})[line["side"]] = line["layers"]
    return found


def drawn(seed: str, names: Sequence[str], layers: dict[str, dict[int, list[Layer]]]) -> Iterator[Training]:
    """Draw trainings without end."""
    chance = random.Random(f"conv6 {seed}")
    while True:
        name = chance.choice(names)
        kind, sides = kind_of(name), layers[name]
        usual = USUAL_SIDES.get(name, USUAL_SIDES[kind])
        side = usual if chance.random() < USUAL else chance.choice(list(sides))
        pixels = (16 if kind == "clips" else 1) * side**2
        top = min(max(ROOM * LARGEST[kind] / pixels, 2 * FEWEST), MOST[kind])
        batch = max(1, round(FEWEST * (top / FEWEST) ** chance.random()))
        dtype = chance.choice(TYPES)
        size = 4 if dtype == "float32" else 2
        yield Training(name, side, batch, dtype, sum(math.prod(layer[2]) for layer in sides[side]) * batch * size)


def calls_of(training: Training, layers: Sequence[Layer], seen: set[str], *, last: bool) -> Iterator[Call]:
    """Yield the calls of a training that were not seen before; images themselves have no gradient."""
    for layer in layers:
        for kind in KINDS:
            call = _call(kind, training.dtype, training.batch, layer, last)
            key = json.dumps(list(call.values()))
            if not _runs_in_cudnn(call) or key in seen:
                continue
            seen.add(key)
            if kind != "input gradient" or layer[0][0] != 3:
                yield call


class Library:
    """cuDNN's library, as it answers for a GPU."""

    def __init__(self, gpu: str = GPU) -> None:
        card = find_gpu(gpu)
        text = device_text(card)
        assert text is not None
        self._factors = level_factors(card)
        self._make = partial(Heuristics, cudnn_library(), text)
        self._processor = partial(
            Processor, card.capability, card.multiprocessors, (2, 11), l2_bytes=card.l2_bytes,
            level_factors=self._factors,
        )  # fmt: skip
        self._heuristics = self._make()

    def answer(self, call: Call) -> tuple[str, int, int]:
        """Return the plan, the bytes, and the engine that runs in its place and is missing without a driver."""
        one, kind = replace(as_convolution(call), level_factors=self._factors), call["kind"]
        found = workspace_bytes(kind, one, self._processor(cudnn=self._heuristics))
        plan = self._heuristics.plan(kind, one, tf32=True, deterministic=False)
        if plan is None:
            return "", found, 0
        text = " ".join([str(plan.engine), *(f"{knob}={value}" for knob, value in plan.knobs)])
        return text, found, missing_engine(kind, one, plan) or 0


def ask(options: argparse.Namespace) -> None:
    """Write the answers to drawn trainings."""
    layers, library, seen = read_layers(), Library(), set[str]()
    names = options.names.split(",") if options.names else NETWORKS
    plans: dict[str, int] = {}
    lines = []
    for training, _ in zip(drawn(options.seed, names, layers), range(options.count), strict=False):
        found = []
        for call in calls_of(training, layers[training.network][training.side], seen, last=options.last):
            plan, size, engine = library.answer(call)
            found.append([plans.setdefault(plan, len(plans)), size, engine])
        lines.append([*training, found])
    with gzip.open(options.out, "wt", encoding="utf-8") as file:
        file.write(json.dumps({"gpu": GPU, "cudnn": "9.19.0", "last": options.last, "plans": list(plans)}) + "\n")
        file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def answered(path: Path) -> Iterator[tuple[Training, Call, str, int, int]]:
    """Yield the calls of a file, each with its training and with what the library answered."""
    layers, seen = read_layers(), set[str]()
    with gzip.open(path, "rt", encoding="utf-8") as file:
        about = json.loads(next(file))
        for *values, answers in map(json.loads, file):
            training = Training(*values)
            every = calls_of(training, layers[training.network][training.side], seen, last=about["last"])
            for call, (plan, size, engine) in zip(every, answers, strict=True):
                yield training, call, about["plans"][plan], size, engine


def main() -> int:
    """List layers, or ask."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("layers", "ask"))
    parser.add_argument("--seed", default="a")
    parser.add_argument("--count", type=int, default=3000, help="trainings")
    parser.add_argument("--names", help="networks, separated by commas")
    parser.add_argument("--last", action="store_true", help="ask for calls in channels-last layout")
    parser.add_argument("--out", type=Path, default=LAYERS)
    options = parser.parse_args()
    if options.what == "layers":
        write_layers(options.out)
    else:
        ask(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())
