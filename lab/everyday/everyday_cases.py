"""The cases in ``cases/*.yaml``, and which of them are held out from tuning."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "src"))  # a checkout that is not installed, such as a GPU machine's

from trainatomy.catalog.machines import reference_host
from trainatomy.results.measurement import HostPace
from trainatomy.results.memory import TOTALS, SkippedSteps, totals_of_run
from trainatomy.workload.measurable import measurable
from trainatomy.workload.schema import Workload

HERE = Path(__file__).parent
CASES = HERE / "cases"
PREDICTIONS = HERE / "predictions"
RECORDS = HERE / "records"


@dataclass(frozen=True, slots=True)
class Case:
    """A case of one kind (the name of its file); ``mapping``: as in a workload file."""

    name: str
    kind: str
    mapping: Mapping[str, Any]

    @property
    def held_out(self) -> bool:
        """True if the case is held out: the last bit of its name's SHA-256 is 0."""
        return hashlib.sha256(self.name.encode()).digest()[-1] % 2 == 0

    def workload(self, gpu: str) -> Workload:
        """Return the case on a GPU, as it is measured: samples of different lengths in one order."""
        return measurable(Workload.from_mapping({**self.mapping, "name": self.name, "gpu": gpu}))


def cases(folder: Path = CASES) -> tuple[Case, ...]:
    """Return the cases of all files of a folder, by the name of the file and in their order."""
    return tuple(case for path in sorted(folder.glob("*.yaml")) for case in _of(path))


def _of(path: Path) -> Iterator[Case]:
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    for name, mapping in content.items():
        yield Case(name, path.stem, mapping)


def chosen(every: tuple[Case, ...], names: str | None, kinds: str | None) -> list[Case]:
    """Return the cases with one of these names and kinds, both separated by commas; None: all."""
    wanted, of = _listed(names), _listed(kinds)
    if unknown := wanted - {case.name for case in every} | of - {case.kind for case in every}:
        raise SystemExit(f"no such cases: {', '.join(sorted(unknown))}")
    return [case for case in every if (not wanted or case.name in wanted) and (not of or case.kind in of)]


def _listed(text: str | None) -> set[str]:
    return set(text.split(",")) if text else set()


def pace_of(record: Mapping[str, Any], backward_share: float | None = None) -> float | None:
    """Return the host's pace during a measured case, beside the reference host's of today; None if it is not known.

    ``backward_share``: as in ``HostPace.beside``.
    """
    recorded, host = record.get("host_pace"), reference_host()
    if not recorded or recorded["probe"] not in host.probe_seconds:
        return None
    probe = recorded["probe"]
    seconds, exponent = host.probe_seconds[probe], host.pace_exponents[probe]
    return HostPace(**{**recorded, "exponent": exponent}).beside(seconds, backward_share)


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file, or of all files in a folder; none if there is none."""
    if path.is_dir():
        return [line for file in sorted(path.glob("*.jsonl")) for line in lines(file)]
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def memory_as_run(prediction: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, int]:
    """Return the predicted totals with as many first steps skipped as gradient scaling skipped in the measured run."""
    stored = prediction["memory"]
    known = [SkippedSteps(**one) for one in stored.get("skipped_steps", ())]
    return totals_of_run({name: stored[name] for name in TOTALS}, known, record.get("skipped_steps"))


def append(path: Path, content: Mapping[str, Any]) -> None:
    """Add a line to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(content) + "\n")
