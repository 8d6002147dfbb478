"""Data sets of a hub and torchvision's downloads: local files take the real path, else rows are made up.

Rows have the schema of the data set, where it is known, and one length: what a batch holds depends on both, so each is
a note on the prediction.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from trainatomy.catalog.files import read_yaml
from trainatomy.errors import WorkloadError
from trainatomy.scripts.job import current_place
from trainatomy.scripts.standins.notes import StandIns

_FILES = ("csv", "json", "text", "parquet", "imagefolder", "arrow")
"""Builders of ``datasets`` that read local files."""
_MOST_IMAGES = 64
_SPLITS = ("train", "validation", "test")
"""Splits of a data set whose own are not known."""


def install(stand_ins: StandIns) -> None:
    """Put them in place, each when its library is imported."""
    stand_ins.when("datasets.load", partial(_put_loading, stand_ins))
    stand_ins.when("datasets.fingerprint", partial(_put_hash, stand_ins))
    stand_ins.when("torchvision.datasets", partial(_put_images, stand_ins))
    stand_ins.when(("torchvision.datasets", "timm.data.dataset_factory"), partial(_put_images_in_timm, stand_ins))
    stand_ins.when("torchvision.utils", partial(_put_saving, stand_ins))
    stand_ins.when("evaluate.loading", partial(_put_metrics, stand_ins))


def _put_metrics(stand_ins: StandIns, evaluate: Any) -> None:
    original = evaluate.load

    def load(name: str, *rest: Any, **options: Any) -> Any:
        try:
            return original(name, *rest, **options)
        except Exception:  # the hub cannot be reached, in any of a dozen ways
            stand_ins.note("metric", name)
            return _Metric()

    _put_where_imported(stand_ins, "evaluate", evaluate, "load", load)


def _put_where_imported(stand_ins: StandIns, package: str, module: Any, name: str, function: Any) -> None:
    """Replace a function of a module, and in its package where that has imported it already."""
    original = getattr(module, name)
    for owner in (module, sys.modules.get(package)):
        if getattr(owner, name, None) is original:
            stand_ins.put(owner, name, function)


class _Metric:
    """A metric that computes nothing."""

    def add_batch(self, *_: Any, **__: Any) -> None:
        """Take predictions."""

    add = add_batch

    def compute(self, *_: Any, **__: Any) -> dict[str, float]:
        """Return a number."""
        return {"accuracy": 0.0, "f1": 0.0}


# -- datasets ----------------------------------------------------------------------------------------------------------


def _put_loading(stand_ins: StandIns, module: Any) -> None:
    original, datasets = module.load_dataset, sys.modules["datasets"]

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
            known = _schema(path, name)
            if known is None:
                place = current_place(stand_ins.script) or "the script"
                raise WorkloadError(
                    f"{place}: the data set {path} is not on this machine, and its columns are not known.\n"
                    "Name a local file with rows like its own (--data FILE.jsonl), or let the script "
                    "download it (--network)"
                ) from error
        stand_ins.note("data set", path)
        return _made(datasets, known, name, split, stand_ins)

    _put_where_imported(stand_ins, "datasets", module, "load_dataset", load)


def _put_hash(stand_ins: StandIns, fingerprint: Any) -> None:
    """Let nothing be cached: a hash would pickle the stand-ins."""
    stand_ins.put(fingerprint.Hasher, "hash", classmethod(_random_hash))


def _random_hash(cls: Any, value: Any) -> str:
    return uuid4().hex[:16]


def _of_file(original: Callable[..., Any], datasets: Any, file: str, split: Any) -> Any:
    """Return the rows of a local file as every split."""
    kinds = {"jsonl": "json", "json": "json", "csv": "csv", "parquet": "parquet", "txt": "text"}
    rows = original(kinds.get(file.rpartition(".")[2], "text"), data_files=file, split="train")
    if split is not None:
        return rows
    return datasets.DatasetDict(dict.fromkeys(("train", "validation", "test"), rows))


def _schema(path: str, configuration: Any) -> Mapping[str, Any] | None:
    """Return what is known of a data set by its name, or by a part of it, and by its configuration."""
    known = read_yaml("datasets.yaml")["datasets"]
    name = path.lower()
    found: Mapping[str, Any] | None = known.get(name) or known.get(name.rpartition("/")[2])
    return None if found is None else {**found, **found.get("configurations", {}).get(configuration, {})}


def _made(datasets: Any, schema: Mapping[str, Any], configuration: Any, split: Any, stand_ins: StandIns) -> Any:
    """Return rows with the columns of a schema; each split has as many."""
    columns: dict[str, Any] = dict(schema["columns"])
    for column, kind in columns.items():
        if kind == "translation":
            columns[column] = tuple(str(configuration).split("-"))
    images = any(kind == "image" for kind in columns.values())
    count = min(stand_ins.samples, _MOST_IMAGES) if images else stand_ins.samples
    content = {name: [_cell(kind, row, stand_ins.lengths) for row in range(count)] for name, kind in columns.items()}
    features = datasets.Features({name: _feature(datasets, kind) for name, kind in columns.items()})
    rows = datasets.Dataset.from_dict(content, features=features)
    if isinstance(split, str) or split is not None:
        return rows if isinstance(split, str) else [rows for _ in split]
    return datasets.DatasetDict(dict.fromkeys(schema.get("splits", _SPLITS), rows))


def words(row: int, count: int) -> str:
    """Return a text of ``count`` words."""
    return " ".join(f"w{(row * 31 + number) % 20000}" for number in range(count))


_ROLES = {"messages": ("user", "assistant"), "prompt": ("user",), "completion": ("assistant",)}
"""Who speaks in the conversations of a column, by its kind."""


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
    if kind in _ROLES:
        texts = (words(row, max(1, length // 2)), words(row + 7, max(1, length // 2)))
        said = dict(zip(_ROLES["messages"], texts, strict=True))
        return [{"role": role, "content": said[role]} for role in _ROLES[kind]]
    if kind == "flag":
        return row % 2 == 0
    if kind in ("number", "score"):
        return row
    if kind == "answers":  # the first word of the context
        return {"text": [words(row, 1)], "answer_start": [0]}
    if isinstance(kind, tuple):  # languages
        return dict.fromkeys(kind, words(row, length))
    if kind == "tokens":
        return words(row, length).split()
    return words(row, length)


def _feature(datasets: Any, kind: Any) -> Any:
    if isinstance(kind, int):
        return datasets.ClassLabel(names=[str(number) for number in range(kind)])
    if kind == "image":
        return datasets.Image()
    if kind in _ROLES:
        return datasets.List({"role": datasets.Value("string"), "content": datasets.Value("string")})
    if kind == "tokens":
        return datasets.List(datasets.Value("string"))
    if kind == "answers":
        return {"text": datasets.List(datasets.Value("string")), "answer_start": datasets.List(datasets.Value("int32"))}
    if isinstance(kind, tuple):
        return datasets.Translation(languages=kind)
    return datasets.Value({"number": "int64", "score": "float32", "flag": "bool"}.get(kind, "string"))


# -- torchvision -------------------------------------------------------------------------------------------------------


class _Shape(NamedTuple):
    """A data set of images: side, channels, classes, and images of the parts for training and for anything else."""

    side: int
    channels: int
    classes: int
    training: int = 4096
    other: int = 4096


_IMAGES = {
    "MNIST": _Shape(28, 1, 10, 60_000, 10_000), "FashionMNIST": _Shape(28, 1, 10, 60_000, 10_000),
    "KMNIST": _Shape(28, 1, 10, 60_000, 10_000), "CIFAR10": _Shape(32, 3, 10, 50_000, 10_000),
    "CIFAR100": _Shape(32, 3, 100, 50_000, 10_000), "ImageFolder": _Shape(256, 3, 1000), "LSUN": _Shape(256, 3, 1),
    "ImageNet": _Shape(256, 3, 1000, 1_281_167, 50_000), "STL10": _Shape(96, 3, 10, 5_000, 8_000),
    "SVHN": _Shape(32, 3, 10, 73_257, 26_032), "Food101": _Shape(256, 3, 101, 75_750, 25_250),
    "Flowers102": _Shape(256, 3, 102, 1_020, 6_149),
}  # fmt: skip
"""Images of torchvision's data sets, as its documentation and the data sets' own pages give them; those of folders, and
how many LSUN has, are a guess.  Scripts divide a data set into parts of known sizes, so that these have to be right."""


def _put_images(stand_ins: StandIns, datasets: Any) -> None:
    for name, shape in _IMAGES.items():
        stand_ins.put(datasets, name, _images(stand_ins, name, getattr(datasets, name), shape))


def _put_images_in_timm(stand_ins: StandIns, datasets: Any, factory: Any) -> None:
    known = {name: getattr(datasets, kind.__name__, kind) for name, kind in factory._TORCH_BASIC_DS.items()}
    stand_ins.put(factory, "_TORCH_BASIC_DS", known)


def _put_saving(stand_ins: StandIns, utilities: Any) -> None:
    def save(images: Any, file: Any, *_: Any, **__: Any) -> None:
        stand_ins.files.note(file)

    stand_ins.put(utilities, "save_image", save)


def _images(stand_ins: StandIns, name: str, original: Any, shape: _Shape) -> Any:
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


def _names_a_part(argument: Any) -> bool:
    """Return whether an argument says which part of a data set is meant: ``train=False``, ``split="test"``."""
    return isinstance(argument, bool | str)


class _MadeImages(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Black images with labels in turn."""

    shape = _Shape(32, 3, 10)

    def __init__(
        self,
        root: Any = "",
        *arguments: Any,
        transform: Any = None,
        target_transform: Any = None,
        train: bool = True,
        split: str = "train",
        **_: Any,
    ) -> None:
        self.root = root
        self.transform = transform or next((one for one in arguments if callable(one)), None)
        self.target_transform = target_transform
        is_training = train and split == "train" and not {False, "val", "test"} & {*filter(_names_a_part, arguments)}
        count = self.shape.training if is_training else self.shape.other
        side, channels, classes = self.shape[:3]
        self.targets = torch.arange(count) % classes
        # Every element is the same one, so that a million images take no memory.
        black = torch.zeros((), dtype=torch.uint8)
        self.data: Any = (
            black.expand(count, side, side) if channels == 1 else black.expand(count, side, side, channels).numpy()
        )
        self.classes = [str(number) for number in range(classes)]
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self.samples = self.imgs = [("", target) for target in self.targets.tolist()]

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        from PIL import Image

        side, channels = self.shape[:2]
        image: Any = Image.new("L" if channels == 1 else "RGB", (side, side))
        target: Any = int(self.targets[index])
        return (
            image if self.transform is None else self.transform(image),
            target if self.target_transform is None else self.target_transform(target),
        )
