"""Price the points of the shipped calibrations, and write their efficiencies: ``src/trainatomy/catalog/compiled/``.

    python lab/compile_calibrations.py

``timing/compiled.py`` says when they are used.
"""

from __future__ import annotations

import json
from pathlib import Path

import trainatomy
from trainatomy.catalog.calibrations import shipped
from trainatomy.operators.cost import FAMILIES
from trainatomy.timing.compiled import FOLDER, INDEX, as_rows, file_of, key_of
from trainatomy.timing.efficiency import EfficiencyPoints, chip_of

OUT = Path(trainatomy.__file__).parent / "catalog" / FOLDER


def main() -> None:
    index = {}
    for name, calibration in shipped().items():
        if calibration.known_gpu is None:
            continue
        chip = chip_of(calibration.known_gpu, None)
        points, modules = EfficiencyPoints(calibration.points, chip), []
        folder = OUT / name
        folder.mkdir(parents=True, exist_ok=True)
        for module in FAMILIES:
            if rows := as_rows(points.of_module(module)):
                modules.append(module)
                text = json.dumps(rows, separators=(",", ":")).replace("]],", "]],\n")
                (folder / file_of(module)).write_text(text + "\n", encoding="utf-8")
        for path in folder.iterdir():
            if path.name not in map(file_of, modules):
                path.unlink()
        index[name] = {"key": key_of(name, chip), "modules": modules, "largest_shares": points.largest_shares}
    (OUT / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
