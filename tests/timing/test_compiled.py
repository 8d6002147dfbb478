"""Compiled efficiencies of shipped calibrations: what computing them returns, and what they follow from."""

from __future__ import annotations

import subprocess
import sys

import pytest

from trainatomy.catalog.calibrations import shipped
from trainatomy.catalog.gpus import find_gpu
from trainatomy.operators.cost.kernel import chip_of
from trainatomy.timing import compiled, cost_model
from trainatomy.timing.compiled import SOURCES, compiled_points
from trainatomy.timing.efficiency import EfficiencyPoints

NAMES = sorted(name for name, calibration in shipped().items() if calibration.known_gpu is not None)
PRICED = """
import sys
from pathlib import Path

import trainatomy
from trainatomy.catalog.calibrations import shipped
from trainatomy.operators.cost.kernel import chip_of
from trainatomy.timing.efficiency import EfficiencyPoints, price_point

root, found = Path(trainatomy.__file__).parent, set()
calibrations = [(chip_of(each.known_gpu, None), each) for each in shipped().values()]


def note(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(str(root)):
        found.add(Path(code.co_filename).relative_to(root).as_posix())
        if code.co_name in ("read_text", "read_yaml"):
            found.add("/".join(("catalog", *frame.f_locals["path"])))


sys.setprofile(note)
for chip, calibration in calibrations:
    EfficiencyPoints(calibration.points, chip)
    for point in calibration.points[::15]:
        price_point(0, point, chip)
sys.setprofile(None)
print(*sorted(found))
"""


@pytest.mark.parametrize("name", NAMES)
def test_shipped_efficiencies_are_up_to_date(name):
    assert compiled_points(name, chip_of(find_gpu(name), None)), "they are stale: run make compiled"


@pytest.mark.parametrize("name", NAMES)
def test_they_are_what_computing_them_returns(name):
    chip = chip_of(find_gpu(name), None)
    known = compiled_points(name, chip)
    computed, read = EfficiencyPoints(shipped()[name].points, chip), EfficiencyPoints((), chip, known)
    assert list(read) == list(computed) and read
    for family in computed:
        assert repr(read[family]) == repr(computed[family])
    assert read.largest_shares == computed.largest_shares


def test_a_change_of_the_sources_or_of_the_gpu_makes_them_stale(monkeypatch):
    gpu = find_gpu("h100-sxm")
    chip = chip_of(gpu, None)
    assert compiled_points("h100-sxm", chip._replace(bandwidth=chip.bandwidth + 1)) is None
    monkeypatch.setattr(compiled, "_sources", lambda: b"changed")
    assert compiled_points("h100-sxm", chip) is None
    points = cost_model.efficiency_points.__wrapped__(gpu, shipped()["h100-sxm"])
    assert points["matmul.half"] and points.of_module("matmul")[0].share > 0


def test_they_are_computed_where_the_files_are_missing(monkeypatch):
    monkeypatch.setattr(compiled, "FOLDER", "nowhere")
    compiled._index.cache_clear()
    try:
        assert compiled_points("h100-sxm", chip_of(find_gpu("h100-sxm"), None)) is None
    finally:
        compiled._index.cache_clear()


def test_the_sources_are_all_files_that_pricing_a_point_reads():
    found = subprocess.run([sys.executable, "-c", PRICED], capture_output=True, text=True, check=True).stdout.split()
    assert "operators/cost/matmul.py" in found and "catalog/efficiency.yaml" in found
    folders = {source for source in SOURCES if "." not in source}
    others = [name for name in found if name not in SOURCES and name.rpartition("/")[0] not in folders]
    assert others == ["catalog/files.py"]
