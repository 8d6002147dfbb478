"""List the convolutions of published networks, at images of random sizes, without a GPU and without weights.

python benchmarks/cudnn/published_layers.py [--sizes 6] [--out records/layers.jsonl.gz]
python benchmarks/cudnn/published_layers.py --trainings FILE --out FILE

Each network of ``published_networks.py`` runs once on meta tensors for each size. A line holds the network, the size of
its images, and its distinct convolutions as cuDNN is called: ``[data, weight, output, strides, padding, dilation,
groups, transposed]``, without the batch. ``handle_answers.py`` draws batches, types and operations for them. With
``--trainings`` the networks are those of a file of cases, at their images, and a line also holds their batch and type.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from published_networks import BATCH, networks
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).parent
LAYERS = HERE / "records" / "layers.jsonl.gz"
Layer = list[Any]


class Convolutions(TorchDispatchMode):
    """Note the distinct convolutions that run, without their batch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Layer] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default:
            data, weight, _, stride, padding, dilation, transposed, _, groups = args
            shapes = [list(data.shape), list(weight.shape), list(result.shape)]
            places = data.dim() - 2
            settings = [list(values) * (places // len(values)) for values in (stride, padding, dilation)]
            if transposed:  # as cuDNN is called: the gradient of the convolution from the result to the input
                shapes[0], shapes[2] = shapes[2], shapes[0]
            if len(shapes[0]) == 3:  # one dimension is passed as the second of two
                shapes = [[*shape[:2], 1, *shape[2:]] for shape in shapes]
                settings = [[neutral, *values] for neutral, values in zip((1, 0, 1), settings, strict=True)]
            if shapes[0][0] == BATCH:
                layer = [shapes[0][1:], shapes[1], shapes[2][1:], *settings, groups, transposed]
                self.found.setdefault(json.dumps(layer), layer)
        return result


def lines(sizes: int, seed: int, only: str | None) -> Iterator[dict[str, Any]]:
    """Yield the layers of each network at some sizes; a network that cannot be built or run is named instead."""
    for name, build in networks():
        if only and only not in name:
            continue
        chance = random.Random(f"{seed} {name}")
        try:
            run = without_data(build)
        except Exception as error:
            print(f"{name}: cannot be built: {type(error).__name__}: {str(error)[:150]}", flush=True)
            continue
        seen: list[list[int]] = []
        for _ in range(sizes):
            size, call = run(chance)
            if size in seen and name != "WhisperModel":
                continue
            seen.append(size)
            noted = Convolutions()
            try:
                with torch.no_grad(), torch.device("meta"), noted:
                    call()
            except Exception as error:
                print(f"{name} {size}: {type(error).__name__}: {str(error)[:150]}", flush=True)
            if noted.found:
                yield {"network": name, "size": size, "layers": list(noted.found.values())}


def without_data(build: Callable[[], Any]) -> Any:
    """Build on the meta device, except for networks that compute their channels with tensors."""
    try:
        with torch.device("meta"):
            return build()
    except NotImplementedError:
        return build()


def of_trainings(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the layers of the trainings in a file of cases, with their batch and type."""
    import networks as made

    known: dict[tuple[str, str], list[Layer]] = {}
    for name, case in yaml.safe_load(path.read_text(encoding="utf-8")).items():
        network, images = (case[of]["factory"].split(":")[1] for of in ("model", "data"))
        setting = case["train"]
        plain = network.removesuffix("_last")
        if (plain, images) not in known:
            shape, noted = getattr(made, images)(1)["images"].shape[1:], Convolutions()
            built: Any = without_data(partial(made.network, plain)).to("meta").network
            with torch.no_grad(), noted:
                built(torch.empty(BATCH, *shape, device="meta"))
            known[plain, images] = list(noted.found.values())
        dtype = "float16" if setting.get("fp16") else "bfloat16" if setting.get("bf16") else "float32"
        about = {"network": name, "size": images, "batch": setting["per_device_train_batch_size"], "dtype": dtype}
        yield about | {"last": network != plain, "layers": known[plain, images]}


def main() -> None:
    """List the layers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, default=6, help="sizes of images that are drawn for each network")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="those networks alone whose name has this text")
    parser.add_argument("--out", type=Path, default=LAYERS)
    parser.add_argument("--trainings", type=Path, action="append", help="a file of cases: their layers instead")
    options = parser.parse_args()
    count = 0
    found = lines(options.sizes, options.seed, options.only)
    if options.trainings:
        found = (line for path in options.trainings for line in of_trainings(path))
    with gzip.open(options.out, "wt", encoding="utf-8") as file:
        for line in found:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
            count += len(line["layers"])
    print(f"{count} layers")


if __name__ == "__main__":
    main()
