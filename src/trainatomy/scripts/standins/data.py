"""Data sets of a hub and torchvision's downloads: local files take the real path, else rows are made up.

Rows have the schema of the data set, where it is known, and one length: what a batch holds depends on both, so each is
a note on the prediction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

import torch

from trainatomy.catalog.files import read_yaml
from trainatomy.errors import WorkloadError
from trainatomy.scripts.places import current_place
from trainatomy.scripts.standins.notes import StandIns

_FILES = ("csv", "json", "text", "parquet", "imagefolder", "arrow")
"""Builders of ``datasets`` that read local files."""
_MOST_IMAGES = 64


def install(stand_ins: StandIns) -> None:
    """Put them in place, for the libraries that are imported."""
    if "datasets" in sys.modules:
        _install_datasets(stand_ins, sys.modules["datasets"])
    if "torchvision.datasets" in sys.modules:
        _install_torchvision(stand_ins, sys.modules["torchvision"])
    evaluate: Any = sys.modules.get("evaluate")
    if evaluate is not None:
        original = evaluate.load

        def load(name: str, *rest: Any, **options: Any) -> Any:
            try:
                return original(name, *rest, **options)
            except Exception:  # the hub cannot be reached, in any of a dozen ways
                stand_ins.note("metric", name)
                return _Metric()

        stand_ins.put(evaluate, "load", load)


class _Metric:
    """A metric that computes nothing."""

    def add_batch(self, *_: Any, **__: Any) -> None:
        """Take predictions."""

    add = add_batch

    def compute(self, *_: Any, **__: Any) -> dict[str, float]:
        """Return a number."""
        return {"accuracy": 0.0, "f1": 0.0}


# -- datasets ----------------------------------------------------------------------------------------------------------


def _install_datasets(stand_ins: StandIns, datasets: Any) -> None:
    original = datasets.load_dataset

    def load(path: str, name: str | None = None, *rest: Any, **options: Any) -> Any:
        split = options.get("split", rest[3] if len(rest) > 3 else None)
        if options.get("data_files") is not None or options.get("data_dir") is not None or path in _FILES:
            return original(path, name, *rest, **options)
        if stand_ins.data is not None:
            stand_ins.note("data set", f"{path} ({stand_ins.data})")
            return _of_file(original, datasets, stand_ins.data, split)
        if options.pop("streaming", False):
            options["streaming"] = False
        try:
            return original(path, name, *rest, **options)
        except Exception as error:  # not in the cache, and the network is off: a dozen kinds of errors
            columns = _schema(path)
            if columns is None:
                raise WorkloadError(
                    f"{current_place(stand_ins.script)}: the data set {path} is not on this machine, and its columns "
                    "are not known.\nName a local file with rows like its own (--data FILE.jsonl), or let the script "
                    "download it (--network)"
                ) from error
        stand_ins.note("data set", path)
        return _made(datasets, columns, split, stand_ins)

    stand_ins.put(datasets, "load_dataset", load)
    module: Any = sys.modules.get("datasets.load")
    if module is not None:
        stand_ins.put(module, "load_dataset", load)
    fingerprint: Any = sys.modules.get("datasets.fingerprint")
    if fingerprint is not None:  # nothing is cached, and a hash would pickle the stand-ins
        stand_ins.put(fingerprint.Hasher, "hash", classmethod(_random_hash))
    one_process = _in_one_process(datasets.Dataset.map)
    stand_ins.put(datasets.Dataset, "map", one_process)


def _random_hash(cls: Any, value: Any, /) -> str:
    return uuid4().hex[:16]


def _in_one_process(original: Callable[..., Any]) -> Callable[..., Any]:
    def mapped(self: Any, *arguments: Any, **options: Any) -> Any:
        options.pop("num_proc", None)
        return original(self, *arguments, **options)

    return mapped


def _of_file(original: Callable[..., Any], datasets: Any, file: str, split: Any) -> Any:
    """Return the rows of a local file as every split."""
    kinds = {"jsonl": "json", "json": "json", "csv": "csv", "parquet": "parquet", "txt": "text"}
    rows = original(kinds.get(file.rpartition(".")[2], "text"), data_files=file, split="train")
    if split is not None:
        return rows
    return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), rows))


def _schema(path: str) -> Mapping[str, Any] | None:
    """Return the columns of a data set that is known by name, or by a part of it."""
    known = read_yaml("datasets.yaml")["datasets"]
    name = path.lower()
    found = known.get(name) or known.get(name.rpartition("/")[2])
    return None if found is None else found["columns"]


def _made(datasets: Any, columns: Mapping[str, Any], split: Any, stand_ins: StandIns) -> Any:
    """Return rows of these columns; each split has as many."""
    images = any(kind == "image" for kind in columns.values())
    count = min(stand_ins.samples, _MOST_IMAGES) if images else stand_ins.samples
    content = {name: [_cell(kind, row, stand_ins.lengths) for row in range(count)] for name, kind in columns.items()}
    features = datasets.Features({name: _feature(datasets, kind) for name, kind in columns.items()})
    rows = datasets.Dataset.from_dict(content, features=features)
    if isinstance(split, str) or split is not None:
        return rows if isinstance(split, str) else [rows for _ in split]
    return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), rows))


def words(row: int, count: int) -> str:
    """Return a text of ``count`` words."""
    return " ".join(f"w{(row * 31 + number) % 20000}" for number in range(count))


def _cell(kind: Any, row: int, length: int) -> Any:
    if isinstance(kind, int):  # classes
        return row % kind
    if kind == "image":
        from PIL import Image

        return Image.new("RGB", (256, 256))
    if kind == "half text":
        return words(row, max(1, length // 2))
    if kind == "short text":
        return words(row, 12)
    if kind == "messages":
        return [
            {"role": "user", "content": words(row, max(1, length // 2))},
            {"role": "assistant", "content": words(row + 7, max(1, length // 2))},
        ]
    if kind == "number":
        return row
    if kind == "tokens":
        return words(row, length).split()
    return words(row, length)


def _feature(datasets: Any, kind: Any) -> Any:
    if isinstance(kind, int):
        return datasets.ClassLabel(names=[str(number) for number in range(kind)])
    if kind == "image":
        return datasets.Image()
    if kind == "messages":
        return datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")})
    if kind == "tokens":
        return datasets.List(datasets.Value("string"))
    return datasets.Value("int64" if kind == "number" else "string")


# -- torchvision -------------------------------------------------------------------------------------------------------

_IMAGES = {
    "MNIST": (28, 1, 10), "FashionMNIST": (28, 1, 10), "KMNIST": (28, 1, 10), "CIFAR10": (32, 3, 10),
    "CIFAR100": (32, 3, 100), "ImageFolder": (256, 3, 1000), "LSUN": (256, 3, 1), "ImageNet": (256, 3, 1000),
    "STL10": (96, 3, 10), "SVHN": (32, 3, 10), "Food101": (256, 3, 101), "Flowers102": (256, 3, 102),
}  # fmt: skip
"""Side, channels and classes of the images of torchvision's data sets, as its documentation gives them; those of
folders are a guess."""


def _install_torchvision(stand_ins: StandIns, torchvision: Any) -> None:
    for name, shape in _IMAGES.items():
        original = getattr(torchvision.datasets, name)
        stand_ins.put(torchvision.datasets, name, _images(stand_ins, name, original, shape))
    factory: Any = sys.modules.get("timm.data.dataset_factory")
    if factory is not None:
        known = {
            name: getattr(torchvision.datasets, kind.__name__, kind) for name, kind in factory._TORCH_BASIC_DS.items()
        }
        stand_ins.put(factory, "_TORCH_BASIC_DS", known)
    if hasattr(torchvision.utils, "save_image"):

        def save(images: Any, file: Any, *_: Any, **__: Any) -> None:
            stand_ins.files.note(file)

        stand_ins.put(torchvision.utils, "save_image", save)


def _images(stand_ins: StandIns, name: str, original: Any, shape: tuple[int, int, int]) -> Any:
    """Return a class whose instances are the real data set where it is on this machine, else made-up images."""

    class Images(_MadeImages):
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            try:
                return original(*arguments, **{key: value for key, value in options.items() if key != "download"})
            except (RuntimeError, OSError, ImportError):
                stand_ins.note("images", name)
                return super().__new__(cls)

    Images.__name__ = Images.__qualname__ = name
    Images.shape = shape
    return Images


class _MadeImages(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Black images with labels in turn."""

    shape = (32, 3, 10)
    count = 4096

    def __init__(
        self, root: Any = "", *arguments: Any, transform: Any = None, target_transform: Any = None, **_: Any
    ) -> None:
        self.root = root
        self.transform = transform or next((one for one in arguments if callable(one)), None)
        self.target_transform = target_transform
        side, channels, classes = self.shape
        self.targets = torch.arange(self.count) % classes
        size = (self.count, side, side) if channels == 1 else (1, side, side, channels)
        self.data = torch.zeros(size, dtype=torch.uint8)
        self.classes = [str(number) for number in range(classes)]
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self.samples = self.imgs = [("", int(target)) for target in self.targets]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        from PIL import Image

        side, channels, _ = self.shape
        image: Any = Image.new("L" if channels == 1 else "RGB", (side, side))
        target: Any = int(self.targets[index])
        return (
            image if self.transform is None else self.transform(image),
            target if self.target_transform is None else self.target_transform(target),
        )
