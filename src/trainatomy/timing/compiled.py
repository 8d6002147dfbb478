"""Efficiencies of the points of shipped calibrations, computed when the package is made: ``catalog/compiled/``.

Each process would otherwise price thousands of points, in a second or more.  The files hold what the same code
returned, to the last bit; ``hatch_build.py`` writes them when the package is built.  They are used only where the
sources, the points and the GPU are those that they were made from, which takes some milliseconds to check; otherwise
the efficiencies are computed.  So a checkout in which a rule of costs was changed does not use those of the old rule;
``make compiled`` writes them again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainatomy.catalog import calibrations
from trainatomy.catalog.calibrations import shipped
from trainatomy.catalog.files import read_text
from trainatomy.operators.cost import FAMILIES
from trainatomy.operators.cost.kernel import Chip, chip_of
from trainatomy.operators.cost.plans import parse_plans, say
from trainatomy.timing.efficiency import EfficiencyPoint, EfficiencyPoints, PricedPoint

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping
    from importlib.resources.abc import Traversable


FOLDER, INDEX = "compiled", "index.json"
SOURCES = (
    *("catalog/calibrations.py", "catalog/cudnn_groups.json", "catalog/efficiency.yaml", "catalog/products.yaml"),
    *("operators", "operators/cost", "operators/table", "results/operations.py", "timing/efficiency.py", "lookup.py"),
)
"""Files of this package, and all Python files of folders, that decide about the efficiency of a point."""


class CompiledPoints:
    """The compiled points of a calibration.

    Attributes:
        modules: Modules of ``operators.cost`` that price some of its points.
        largest_shares: Largest share of the peak of each precision that a matrix product reached.
    """

    def __init__(self, name: str, modules: Collection[str], largest_shares: Mapping[str, float]) -> None:
        self._name, self.modules, self.largest_shares = name, modules, largest_shares

    def of_module(self, module: str) -> list[PricedPoint]:
        """Return the points that a module prices, by family."""
        families = json.loads(read_text(FOLDER, self._name, file_of(module))) if module in self.modules else {}
        return [
            PricedPoint(
                place, family, EfficiencyPoint(tuple(features), ratio, kernels, bool(local), parse_plans(plans))
            )
            for family, rows in families.items()
            for place, ratio, kernels, local, plans, *features in rows
        ]


def compiled_points(name: str, chip: Chip) -> CompiledPoints | None:
    """Return the compiled points of a shipped calibration; None where they are missing, or made from other sources."""
    known = _index().get(name)
    if known is None or known["key"] != key_of(name, chip):
        return None
    return CompiledPoints(name, known["modules"], known["largest_shares"])


def write() -> None:
    """Price the points of the shipped calibrations and write their efficiencies, unless those that are there hold."""
    out, index = Path(__file__).parents[1] / "catalog" / FOLDER, {}
    chips = {name: chip_of(one.known_gpu, None) for name, one in shipped().items() if one.known_gpu is not None}
    if all(compiled_points(name, chip) for name, chip in chips.items()):
        return
    for name, chip in chips.items():
        points, folder = EfficiencyPoints(shipped()[name].points, chip), out / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        rows = {module: found for module in FAMILIES if (found := as_rows(points.of_module(module)))}
        for module, found in rows.items():
            (folder / file_of(module)).write_text(json.dumps(found, separators=(",", ":")), encoding="utf-8")
        index[name] = {"key": key_of(name, chip), "modules": list(rows), "largest_shares": points.largest_shares}
    (out / INDEX).write_text(json.dumps(index), encoding="utf-8")  # last: without it, the other files do not count
    _index.cache_clear()


def key_of(name: str, chip: Chip) -> str:
    """Return the hash of all that the efficiencies of a shipped calibration's points follow from."""
    folder = files(calibrations.__package__).joinpath("calibrations", name)
    parts = _content(entry for entry in folder.iterdir() if entry.name.endswith(".json"))
    return hashlib.sha256(b"\n".join((_sources(), repr(chip).encode(), parts))).hexdigest()


def file_of(module: str) -> str:
    """Return the name of a module's file; points with tensors in host memory have no module."""
    return f"{module or 'host'}.json"


def as_rows(points: Iterable[PricedPoint]) -> dict[str, list[list[Any]]]:
    """Return points as they are stored, by family."""
    rows: dict[str, list[list[Any]]] = {}
    for place, family, point, *_ in sorted(points):
        own = [place, point.log_efficiency, point.kernels, int(point.local), say(point.plans), *point.features]
        rows.setdefault(family, []).append(own)
    return rows


@cache
def _index() -> Mapping[str, Any]:
    try:
        found: Mapping[str, Any] = json.loads(read_text(FOLDER, INDEX))
    except FileNotFoundError:
        return {}
    return found


@cache
def _sources() -> bytes:
    package, found = files("trainatomy"), b""
    for source in SOURCES:
        entry = package.joinpath(*source.split("/"))
        python = (part for part in entry.iterdir() if part.name.endswith(".py")) if entry.is_dir() else (entry,)
        found += _content(python)
    return hashlib.sha256(found).digest()


def _content(entries: Iterable[Traversable]) -> bytes:
    """Return the names and the bytes of files."""
    return b"".join(entry.name.encode() + entry.read_bytes() for entry in sorted(entries, key=lambda entry: entry.name))


if __name__ == "__main__":
    write()
