"""Ask cuDNN's heuristics for many convolutions by the handle of a GPU, and without its driver, in many processes.

python benchmarks/cudnn/handle_answers.py --out FOLDER [--seconds 120] [--processes 14]                  (on a GPU)
python benchmarks/cudnn/handle_answers.py --out FOLDER --sources driverless [--count 2000]         (without a GPU)

The calls are those of trainings that were measured before, of published networks (``published_layers.py``) at random
batches, and random ones. They follow from the seed, so that they need not be stored. Calls of one *configuration*
(network, size of images, batch, type, layout) are on one side, ``table`` or ``held out``.

Each process writes a file of lines ``[number of the call, plan, bytes of workspace, ...]`` by ``handle``; those by
``driverless`` hold the first plans of the list before. For fp32, the plan without TF32 and its workspace follow; the
plan with ``deterministic`` follows where it is another.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import math
import multiprocessing
import os
import random
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from draw_trainings import NETWORKS
from network_calls import as_convolution
from probe import library as loaded

from trainatomy.catalog.cudnn import device_text
from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.allocation.cudnn import backend, heuristics
from trainatomy.operators.allocation.cudnn.grouped import is_cudnn_depthwise
from trainatomy.operators.allocation.cudnn.heuristics import Choice
from trainatomy.operators.allocation.cudnn.library import cudnn_library

HERE = Path(__file__).parent
LAYERS = HERE / "records" / "layers.jsonl.gz"
TRAININGS = HERE / "records" / "layers-of-trainings.jsonl.gz"
TYPES = ("float32", "float16", "bfloat16")
KINDS = ("forward", "input gradient", "weight gradient")
BATCHES = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 256)
TRANSPOSED = (
    (2, 2, 0, 0), (2, 2, 0, 0), (4, 2, 1, 0), (3, 2, 1, 1), (3, 1, 1, 0), (4, 4, 0, 0), (5, 2, 2, 1), (4, 1, 0, 0),
    (1, 1, 0, 0),
)  # fmt: skip
"""Taps, stride, padding and output padding of transposed convolutions."""
CALLS_OF_CONFIGURATION = 24
"""Calls that are drawn of one configuration, at most."""
LARGEST = 2**31
"""Elements of the largest tensor, at images twice as high and wide."""
LISTED = 4
"""Plans of the list without a driver that are written down."""
HELD_OUT = 5
"""One of so many configurations is held out."""
Call = dict[str, Any]
Layer = list[Any]
"""Shapes without the batch, and settings, of a line of ``published_layers.py``."""


def batch_of(chance: random.Random, most: int) -> int:
    """Draw a batch: a usual one, or any."""
    usual = [size for size in BATCHES if size <= most]
    return chance.choice(usual) if chance.random() < 0.6 else round(most ** chance.random())


def side_of(configuration: str) -> str:
    """Return on which side a configuration is, by hash."""
    return "held out" if int(hashlib.md5(configuration.encode()).hexdigest(), 16) % HELD_OUT == 0 else "table"


def published(seed: int, layers: Path = LAYERS, only: tuple[str, ...] = ()) -> Iterator[Call]:
    """Yield calls of published networks without end, configuration after configuration.

    Half of them have images of yet another size: each layer is as large as a factor makes it.
    """
    with gzip.open(layers, "rt", encoding="utf-8") as file:
        runs = [json.loads(line) for line in file]
    for run in runs:
        run["largest"] = max(max(math.prod(layer[0]), math.prod(layer[2])) for layer in run["layers"])
    names = sorted({run["network"] for run in runs if not only or run["network"] in only})
    by_name = {name: [run for run in runs if run["network"] == name] for name in names}
    chance = random.Random(f"published {seed}")
    while True:
        run = chance.choice(by_name[chance.choice(names)])
        largest = run["largest"]
        batch = batch_of(chance, max(1, min(256, LARGEST // (4 * largest))))
        dtype, last = chance.choice(TYPES), chance.random() < 0.2
        factor = 2 ** chance.uniform(-1, 1) if chance.random() < 0.5 else 1
        configuration = f"{run['network']} {run['size']} {factor:.3f} {batch} {dtype} {last}"
        side, kinds = side_of(configuration), len(KINDS)
        every = len(run["layers"]) * kinds
        for number in chance.sample(range(every), min(every, CALLS_OF_CONFIGURATION)):
            layer = resized(run["layers"][number // kinds], factor)
            yield _call(KINDS[number % kinds], dtype, batch, layer, last) | {"side": side}


def resized(layer: Layer, factor: float) -> Layer:
    """Return a layer at images that are so many times as large; as it is where it would have no output."""
    data, weight, output, strides, padding, dilation, groups, transposed = layer
    if factor == 1 or transposed:
        return layer
    places = [size if size == 1 else max(2, round(size * factor)) for size in data[1:]]
    after = [
        (size + 2 * pad - wide * (taps - 1) - 1) // stride + 1
        for size, pad, wide, taps, stride in zip(places, padding, dilation, weight[2:], strides, strict=True)
    ]
    if min(after) < 1:
        return layer
    return [[data[0], *places], weight, [output[0], *after], strides, padding, dilation, groups, transposed]


def _call(kind: str, dtype: str, batch: int, layer: Layer, last: bool) -> Call:
    data, weight, output, strides, padding, dilation, groups, transposed = layer
    last = last and min(len(data), 3) == 3 and data[1] != 1  # rows of one dimension are contiguous
    return {
        "kind": kind, "dtype": dtype, "data": [batch, *data], "weight": weight, "output": [batch, *output],
        "strides": strides, "padding": padding, "dilation": dilation, "groups": groups, "transposed": transposed,
        "last": last,
    }  # fmt: skip


def invented(seed: int) -> Iterator[Call]:
    """Yield random calls without end: 1x1 to 7x7 filters between channels in multiples of 8, or any."""
    chance = random.Random(f"invented {seed}")
    while True:
        rows = round(3 * (256 / 3) ** chance.random())
        columns = rows if chance.random() < 0.8 else round(3 * (256 / 3) ** chance.random())
        taps, stride = chance.choice((1, 1, 1, 1, 2, 3, 3, 3, 3, 4, 5, 7)), chance.choice((1, 1, 1, 2))
        dilation = chance.choice((2, 4, 6, 12)) if taps == 3 and stride == 1 and chance.random() < 0.1 else 1
        padding = chance.choice((dilation * (taps // 2), dilation * (taps // 2), 0))
        step = chance.choice((8, 8, 8, 16, 32, 1))
        inside, outside = (max(1, round(2048 ** chance.random() / step)) * step for _ in range(2))
        if chance.random() < 0.06:
            inside = 3
        groups, form = 1, chance.choice(("", "", "", "", "", "depthwise", "groups"))
        if form == "depthwise" and inside > 3:
            groups, outside = inside, inside
        if form == "groups":
            width = chance.choice((2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128))
            groups = chance.choice((2, 4, 6, 8, 12, 16, 32, 32, 64))
            inside = outside = width * groups
        after = [(size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1 for size in (rows, columns)]
        if min(after) < 1 or inside * rows * columns > 2**24 or outside * after[0] * after[1] > 2**24:
            continue
        most = min(256, 2**29 // max(inside * rows * columns, outside * after[0] * after[1]))
        layer = [
            [inside, rows, columns], [outside, inside // groups, taps, taps], [outside, *after],
            [stride] * 2, [padding] * 2, [dilation] * 2, groups, False,
        ]  # fmt: skip
        dtype, last = chance.choice(TYPES), chance.random() < 0.2
        configuration = json.dumps(layer[:2])
        batch = batch_of(chance, max(1, most))
        for kind in KINDS:
            yield _call(kind, dtype, batch, layer, last) | {"side": side_of(configuration)}


def transposed(count: int, seed: int) -> list[Call]:
    """Return random transposed convolutions of two and three dimensions, each with its three operations.

    A transposed convolution is described as the one that it is the gradient of: ``data`` is its result.
    """
    chance, found = random.Random(f"transposed {seed}"), list[Call]()
    while len(found) < count:
        dimensions = chance.choice((2, 3, 3))
        taps, stride, padding, more = chance.choice(TRANSPOSED)
        top = 40 if dimensions == 3 else 128
        rows = round(3 * (top / 3) ** chance.random())
        places = [rows if chance.random() < 0.6 else round(3 * (top / 3) ** chance.random()) for _ in range(dimensions)]
        inside = chance.choice((1, 2, 3, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 512))
        outside = chance.choice((4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 512, 1024))
        grown = [(place - 1) * stride - 2 * padding + taps + more for place in places]
        each = max(inside * math.prod(grown), outside * math.prod(places))
        if each > 2**25:
            continue
        batch = round(min(128, 2**28 // each) ** chance.random())
        layer = [
            [inside, *grown], [outside, inside, *[taps] * dimensions], [outside, *places],
            [stride] * dimensions, [padding] * dimensions, [1] * dimensions, 1, True,
        ]  # fmt: skip
        dtype = chance.choice(TYPES)
        configuration = json.dumps([dtype, batch, *layer[:2]])
        found += [_call(kind, dtype, batch, layer, False) | {"side": side_of(configuration)} for kind in KINDS]
    return found[:count]


def of_trainings(path: Path = TRAININGS) -> Iterator[Call]:
    """Yield all calls of trainings that were measured before."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for run in map(json.loads, file):
            for layer in run["layers"]:
                for kind in KINDS:
                    yield _call(kind, run["dtype"], run["batch"], layer, run["last"]) | {"side": "table"}


def calls(count: int, seed: int, layers: Path = LAYERS, trainings: Path = TRAININGS) -> list[Call]:
    """Return distinct calls: those of trainings, then those of published networks and one of four an invented one.

    One of four is of the twenty networks that are used most. A call that is on both sides is not held out.
    """
    most_used = published(seed + 1000, layers, NETWORKS)
    sources = published(seed, layers), most_used, published(seed + 2000, layers), invented(seed)
    found: dict[str, Call] = {_key(call): call for call in of_trainings(trainings) if _runs_in_cudnn(call)}
    while len(found) < count:
        for source in sources:
            call = next(source)
            if ((key := _key(call)) not in found or call["side"] == "table") and _runs_in_cudnn(call):
                found[key] = call
    return list(found.values())[:count]


def _runs_in_cudnn(call: Call) -> bool:
    """Return whether cuDNN runs a call; contiguous depthwise ones run in PyTorch's kernel, some of fp16 aside."""
    if call["weight"][1] > 1 or call["groups"] == 1 or call["last"] or call["transposed"]:
        return True
    return call["groups"] != call["data"][1] or is_cudnn_depthwise(as_convolution(call))


def calls_of(trainings: Path, seed: int) -> list[Call]:
    """Return the distinct calls of trainings, in a random order."""
    found = {_key(call): call for call in of_trainings(trainings) if _runs_in_cudnn(call)}
    every = list(found.values())
    random.Random(f"calls of trainings {seed}").shuffle(every)
    return every


def checksum(every: list[Call]) -> str:
    """Return a sum that is equal where the same calls were drawn."""
    return hashlib.md5("".join(map(_key, every)).encode()).hexdigest()[:12]


def _key(call: Call) -> str:
    return str([value for name, value in call.items() if name != "side"])


def answers_in(files: Iterable[Path]) -> tuple[dict[str, Any], dict[int, list[Any]]]:
    """Return what files of answers are about, and the answers by the number of the call."""
    about: dict[str, Any] = {}
    found = {}
    for path in files:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            about = json.loads(next(file))
            found.update({number: answer for number, *answer in map(json.loads, file) if answer[0] != "error"})
    return about, found


def asked(call: Call, cudnn: Any, target: Any, listed: int) -> list[Any]:
    """Return the plans of a call under each of the settings that decide about plans, and their workspaces."""
    one = as_convolution(call)
    choices = {"usual": Choice(), "deterministic": Choice(deterministic=True)}
    if call["dtype"] == "float32":
        choices["no tf32"] = Choice(tf32=False)
    found: dict[str, list[Any]] = {}
    named = ""
    graph = heuristics._graph(call["kind"], one, cudnn, target)
    for mode in (backend.Mode.INSTANT, backend.Mode.FALLBACK):
        configurations = heuristics._configurations(graph, mode, cudnn, target)
        if listed and mode is backend.Mode.INSTANT:
            named = " | ".join([heuristics._text(config) for config in configurations[:listed]])
        for config in configurations:
            engine = config.descriptors(backend.Attribute.CONFIG_ENGINE, backend.Kind.ENGINE, 1)[0]
            notes = engine.integers(backend.Attribute.ENGINE_NOTES, backend.Type.NUMERICAL_NOTE, backend.NOTES)
            wanted = [name for name in choices if name not in found and choices[name].allows(notes, one.dtype)]
            if not wanted:
                continue
            try:
                size = heuristics._workspace(config, cudnn, target)
            except backend.BackendError:
                continue
            text = heuristics._text(config) + ("" if mode is backend.Mode.INSTANT else " last")
            found.update({name: [text, size] for name in wanted})
            if len(found) == len(choices):
                break
        if len(found) == len(choices):
            break
    usual = found.get("usual", ["", -1])
    answer = [named, *usual] if listed else [*usual]
    if "no tf32" in choices:
        answer += found.get("no tf32", ["", -1])
    if found.get("deterministic", ["", -1]) != usual:
        answer += found.get("deterministic", ["", -1])
    return answer


def work(source: str, number: int, every: list[Call], options: argparse.Namespace) -> None:
    """Ask for one part of the calls and write the answers."""
    began = time.monotonic()
    out = options.out / f"{source}-{number:02}.jsonl.gz"
    with gzip.open(out, "wt", encoding="utf-8") as file:
        if source == "handle":
            torch.zeros(1, device="cuda")
            gpu, listed = torch.cuda.get_device_name(), 0
            cudnn = backend.Backend(options.library or loaded())
            target: Any = cudnn.handle()
        else:
            text = device_text(find_gpu("h200"))
            assert text is not None
            gpu, listed = "none", LISTED
            cudnn = backend.Backend(options.library or loaded()) if torch.version.cuda else cudnn_library()
            target = cudnn.device(text)
        about = {"gpu": gpu, "torch": torch.__version__, "cudnn": cudnn.version, "seed": options.seed}
        about |= {"count": len(every), "part": number, "calls": options.checksum}
        file.write(json.dumps(about) + "\n")
        count = 0
        for place in options.places[number :: options.processes]:
            if time.monotonic() > options.deadline:
                break
            try:
                line = [place, *asked(every[place], cudnn, target, listed)]
            except backend.BackendError as error:
                line = [place, "error", str(error)[:60]]
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            count += 1
            if count % 500 == 0:
                file.flush()
    print(f"{source} {number}: {count} calls in {time.monotonic() - began:.1f} s", flush=True)


def main() -> None:
    """Ask in processes that are forked before CUDA is loaded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder")
    parser.add_argument("--count", type=int, default=300_000, help="calls")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=Path, default=LAYERS)
    parser.add_argument("--trainings", type=Path, help="ask for the calls of these trainings, and no others")
    parser.add_argument("--sources", default="handle,driverless", help="by what is asked, one after the other")
    parser.add_argument("--of", type=Path, help="a file of answers: ask for the calls that it answers, and no others")
    parser.add_argument("--processes", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=120, help="after which nothing is asked, for all sources")
    parser.add_argument("--expect", help="the sum of the calls; others are written down")
    parser.add_argument("--library", type=Path, help="the file of cuDNN (default: the one that PyTorch loads)")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    began, sources = time.monotonic(), options.sources.split(",")
    if options.trainings:
        every = calls_of(options.trainings, options.seed)
    else:
        every = calls(options.count, options.seed, options.layers)
    options.checksum = checksum(every)
    options.places = sorted(answers_in([options.of])[1]) if options.of else range(len(every))
    print(f"{len(every)} calls ({options.checksum}) drawn in {time.monotonic() - began:.1f} s", flush=True)
    if options.expect and options.expect != options.checksum:
        print("these are other calls than expected: they are written down", flush=True)
        with gzip.open(options.out / "calls.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(list(call.values()), separators=(",", ":")) + "\n" for call in every)
    fork = multiprocessing.get_context("fork")
    for number, source in enumerate(sources):
        left = began + options.seconds - time.monotonic()
        options.deadline = time.monotonic() + left / (len(sources) - number)
        if source == "driverless":
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        running = [fork.Process(target=work, args=(source, part, every, options)) for part in range(options.processes)]
        for process in running:
            process.start()
        for process in running:
            process.join()
    print(f"done in {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main()
