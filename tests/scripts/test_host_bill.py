"""The host's bill of a script: what it imports, loads, keeps, saves, and what its DataLoaders take."""

from __future__ import annotations

from typing import Any

import pytest
from script_types import RunScript

from trainatomy.catalog.host import Footprint, imported_footprint
from trainatomy.errors import WorkloadError
from trainatomy.results.host import HostBill, HostPhase
from trainatomy.scripts.job import Outcome

MIB = 1 << 20
MODEL = """
import torch
from torch import nn
model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
LOOP = (
    MODEL
    + """
for _ in range(5):
    model(torch.randn(8, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)
WEIGHT = 4 * 1024 * 1024
"""Bytes of a layer."""


def bill(outcome: Outcome) -> HostBill:
    assert outcome.message == ""
    assert outcome.prediction is not None
    assert outcome.prediction.host_bill is not None
    return outcome.prediction.host_bill


def phase(found: HostBill, name: str) -> HostPhase:
    return next(each for each in found.phases if each.name == name)


def sizes(found: HostPhase, component: str) -> dict[str, int]:
    parts = [part for process in found.processes for part in process.parts if part.component == component]
    return {part.kind: part.bytes for part in parts}


def test_weights_are_in_memory_until_they_are_on_the_gpu(run_script: RunScript) -> None:
    found = bill(run_script(LOOP))
    assert sizes(phase(found, "loading"), "weights") == {"anonymous": 4 * WEIGHT}
    assert sizes(phase(found, "training"), "offloaded") == {}
    assert [each.name for each in found.phases] == ["libraries", "loading", "training"]


def test_layers_that_are_swapped_stay_on_the_host(run_script: RunScript) -> None:
    """A copy to the host is pageable, one that does not block pinned."""
    text = LOOP.replace(
        "    optimizer.zero_grad()", "    optimizer.zero_grad()\n    {move}\n    kept = model[0].to('cuda')"
    )
    plain, later = (
        sizes(phase(bill(run_script(text.replace("{move}", move))), "training"), "offloaded")
        for move in ("model[:2].to('cpu'); model[1].to('cuda')", "model[0].to('cpu', non_blocking=True)")
    )
    assert plain == {"anonymous": 2 * WEIGHT}
    assert later == {"pinned": WEIGHT}


def test_pinned_weights_are_counted_as_pinned(run_script: RunScript) -> None:
    found = bill(run_script(LOOP + "    host = [torch.ones(3, 1000, 1000).pin_memory()]\n"))
    assert sizes(phase(found, "training"), "offloaded") == {}  # data of the script itself is no tensor of the model
    pinned = "    host = [nn.Parameter(torch.ones(3, 1000, 1000)).pin_memory()]\n"
    assert sizes(phase(bill(run_script(LOOP + pinned)), "training"), "offloaded")["pinned"] == 2 * 16 * MIB


def test_workers_and_what_they_make_are_those_of_the_loader(run_script: RunScript) -> None:
    text = (
        MODEL
        + """
from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.zeros(400, 1024))
for (x,) in DataLoader(data, batch_size=100, num_workers={workers}, prefetch_factor={ahead}, pin_memory={pins}):
    model(x.cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    )
    batch = 100 * 1024 * 4
    found = phase(bill(run_script(text.format(workers=3, ahead=4, pins=True))), "training")
    (workers,) = [process for process in found.processes if process.role == "worker"]
    assert workers.count == 3
    assert found.shm_bytes == 12 * batch
    assert sizes(found, "batches")["pinned"] == 14 * 2**19
    alone = phase(bill(run_script(text.format(workers=0, ahead=None, pins=False))), "training")
    assert alone.shm_bytes == 0
    assert sizes(alone, "batches") == {"anonymous": 2 * batch}


def test_loaders_that_a_framework_makes_anew_keep_their_workers(run_script: RunScript) -> None:
    text = (
        MODEL
        + """
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.zeros(80, 1024)), batch_size=8, num_workers=2)
accelerator = Accelerator()
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for (x,) in loader:
    accelerator.backward(model(x).sum())
    optimizer.step()
    optimizer.zero_grad()
"""
    )
    found = phase(bill(run_script(text)), "training")
    assert [process.count for process in found.processes if process.role == "worker"] == [2]


@pytest.mark.parametrize(
    ("save", "copied"),
    [
        ("torch.save(model.state_dict(), 'model.pt')", WEIGHT),
        ("from safetensors.torch import save_file; save_file(model.state_dict(), 'model.safetensors')", 4 * WEIGHT),
    ],
)
def test_saving_copies_one_tensor_after_the_other_or_all(run_script: RunScript, save: str, copied: int) -> None:
    found = phase(bill(run_script(LOOP + f"    {save}\n")), "saving")
    assert sizes(found, "checkpoint") == {"anonymous": copied}
    assert found.disk_bytes == 2 * 4 * WEIGHT  # the new file beside the old one


@pytest.mark.parametrize(("dtype", "kinds"), [("float32", {"mapped"}), ("bfloat16", {"mapped", "anonymous"})])
def test_weights_of_a_file_are_mapped_unless_they_are_cast(run_script: RunScript, dtype: str, kinds: set[str]) -> None:
    text = f"""
import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("openai-community/gpt2", dtype=torch.{dtype}).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(4):
    words = torch.ones(1, 16, dtype=torch.long, device="cuda")
    model(words, labels=words).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    found = sizes(phase(bill(run_script(text)), "loading"), "weights")
    assert {kind for kind, size in found.items() if size > MIB} == kinds


def test_a_limit_is_held_against_the_bill(run_script: RunScript) -> None:
    found = bill(run_script(LOOP, host_memory=3 * 2**30, dataset_memory=2**33))  # more than the libraries of all tests
    assert found.verdict == "does not fit"
    assert found.shortages[0].component == "dataset"
    assert bill(run_script(LOOP, host_memory=64 * 2**30)).verdict == "fits"
    with pytest.raises(WorkloadError, match="less than Python and its libraries take"):
        run_script(LOOP, host_memory=100 * MIB)


def test_libraries_are_those_that_were_imported() -> None:
    measured: dict[str, Any] = {"cv2": Footprint(50, 7), "torch": Footprint(10**9, 0)}
    plain = imported_footprint({"torch"}, {})
    more = imported_footprint({"torch", "cv2"}, measured)
    assert more == plain.plus(Footprint(50, 7))  # PyTorch is in the data file
    with_transformers = imported_footprint({"torch", "transformers", "sklearn"}, {})
    assert with_transformers.anonymous > plain.anonymous
