"""What cuDNN's heuristics answer on a GPU, with and without its handle, and what PyTorch allocates for the same calls.

python benchmarks/cudnn/probe.py --out cudnn.jsonl [--seconds 120] [--library .../libcudnn.so.9]      (on a GPU)
python benchmarks/cudnn/probe.py --benchmark --out benchmark.jsonl [--seconds 40]                     (on a GPU)
python benchmarks/cudnn/probe.py --plans 0/4 --out plans.jsonl.gz [--seconds 50]                      (on a GPU)

The calls are those of ``tests/data/workspaces-h200.json.gz`` and then random ones that no rule was made from. The file
holds one line for the GPU (with its properties as cuDNN serialises them), one for each call, and the log of a few.
With ``--benchmark`` the calls are made with ``torch.backends.cudnn.benchmark``, twice: all plans are tried, then the
fastest is called again. They are those of a GAN, and then random ones. With ``--plans`` nothing is run: all plans that
the handle offers are listed, for the networks' calls in fp32 and for random ones; ``0/4`` is the first of four parts.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from trainatomy.operators.allocation.cudnn import backend
from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind
from trainatomy.operators.allocation.cudnn.heuristics import Choice, plans

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

import workspaces as measured

SAMPLE = Path(__file__).parents[2] / "tests" / "data" / "workspaces-h200.json.gz"
KINDS: tuple[Kind, Kind, Kind] = ("forward", "input gradient", "weight gradient")
SWAPPED: dict[Kind, Kind] = {"forward": "input gradient", "input gradient": "forward"}
PLANS = 8
"""Plans of each answer that are written down."""
LOGGED = 6
"""Calls of the log."""


def library() -> Path:
    """Return the file of cuDNN that PyTorch loads."""
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8").split()
    return Path(next((word for word in mapped if word.endswith("libcudnn.so.9")), "libcudnn.so.9"))


def sampled() -> list[dict[str, Any]]:
    """Return the convolutions of the stored sample, without what was measured."""
    with gzip.open(SAMPLE, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file][1:]
    return [line for line in lines if line["kind"] == "convolution"]


def as_called(case: dict[str, Any]) -> Convolution:
    """Return the convolution of a case as cuDNN is called."""
    data = (case["batch"], case["inside"], *case["places"])
    output, ends = tuple(case["output"]), (case["outside"], case["inside"])
    if case["transposed"]:
        data, output, ends = output, data, ends[::-1]
    weight = (ends[0], ends[1] // case["groups"], *case["kernel"])
    settings = [case["stride"], case["padding"], case["dilation"]]
    if len(data) == 3:
        data, weight, output = ((*shape[:2], 1, *shape[2:]) for shape in (data, weight, output))
        settings = [[neutral, *values] for neutral, values in zip((1, 0, 1), settings, strict=True)]
    shapes = torch.Size(data), torch.Size(weight), torch.Size(output)
    how = case["groups"], case["transposed"], case["last"], 132
    return Convolution(*shapes, getattr(torch, case["dtype"]), settings[0], settings[1], settings[2], *how)


def answers(case: dict[str, Any], cudnn: backend.Backend, target: Any) -> dict[str, Any]:
    """Return engine, knobs, notes and workspace of the first plans of each operation."""
    one = as_called(case)
    found: dict[str, Any] = {}
    for kind in KINDS:
        asked = SWAPPED.get(kind, kind) if case["transposed"] else kind
        try:
            offered = islice(plans(asked, one, cudnn, target, Choice()), PLANS)
            found[kind] = [[plan.engine, plan.knobs, plan.notes, plan.workspace] for plan in offered]
        except backend.BackendError as error:
            found[kind] = str(error)
    return found


def of_gan() -> list[dict[str, Any]]:
    """Return the convolutions of a DCGAN for images of 64 x 64 in fp32, as in PyTorch's examples."""
    generator = [(100, 512, 1, 1, 0), (512, 256, 4, 2, 1), (256, 128, 8, 2, 1), (128, 64, 16, 2, 1), (64, 3, 32, 2, 1)]
    critic = [(3, 64, 64, 2, 1), (64, 128, 32, 2, 1), (128, 256, 16, 2, 1), (256, 512, 8, 2, 1), (512, 1, 4, 1, 0)]
    return [
        {
            "kind": "convolution", "dtype": "float32", "batch": 64, "inside": inside, "outside": outside, "groups": 1,
            "places": [side] * 2, "kernel": [4] * 2, "stride": [stride] * 2, "padding": [padding] * 2,
            "dilation": [1] * 2, "transposed": transposed, "last": False,
        }
        for layers, transposed in ((generator, True), (critic, False))
        for inside, outside, side, stride, padding in layers
    ]  # fmt: skip


def benchmarked(options: argparse.Namespace) -> Any:
    """Yield what calls allocate while PyTorch tries all plans and with the one that it keeps, and all plans offered."""
    begin = time.monotonic()
    torch.zeros(1, device="cuda")
    torch.backends.cudnn.benchmark = True
    cudnn = backend.Backend(options.library or library())
    handle = cudnn.handle()
    yield {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": cudnn.version}
    gan = of_gan()
    for number, case in enumerate([*gan, *measured.convolutions(500, random.Random(options.seed))]):
        if time.monotonic() - begin > options.seconds:
            return
        line: dict[str, Any] = {**case, "source": "gan" if number < len(gan) else "random"}
        try:
            line["tried"] = measured.measured_convolution(case)
            line["kept"] = measured.measured_convolution(case)
            one = as_called({**case, "output": line["tried"]["output"]})
            line["plans"] = {}
            for kind in KINDS:
                asked = SWAPPED.get(kind, kind) if case["transposed"] else kind
                offered = plans(asked, one, cudnn, handle, Choice())
                line["plans"][kind] = [[plan.engine, plan.workspace] for plan in offered]
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            torch.cuda.empty_cache()
        yield line


def listed(options: argparse.Namespace) -> Any:
    """Yield all plans that the handle offers for one part of the calls."""
    from network_calls import CALLS, as_convolution, as_line

    begin = time.monotonic()
    torch.zeros(1, device="cuda")
    cudnn = backend.Backend(options.library or library())
    handle = cudnn.handle()
    yield {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": cudnn.version}
    with gzip.open(CALLS, "rt", encoding="utf-8") as file:
        calls = [line for line in map(json.loads, file) if line["dtype"] == "float32"]
    for number, case in enumerate(measured.convolutions(1200, random.Random(options.seed))):
        dtype = case["dtype"] if number % 3 == 0 else "float32"
        one = as_called({**case, "dtype": dtype, "output": output_of(case)})
        calls += [as_line(kind, one) for kind in KINDS]
    chance = random.Random(options.seed)
    chance.shuffle(calls)
    part, parts = map(int, options.plans.split("/"))
    for line in calls[part::parts]:
        if time.monotonic() - begin > options.seconds:
            return
        found = {name: value for name, value in line.items() if name not in ("networks", "library", "rules")}
        try:
            offered = plans(line["kind"], as_convolution(line), cudnn, handle, Choice())
            found["plans"] = [[plan.engine, plan.knobs, plan.notes, plan.workspace] for plan in offered]
        except backend.BackendError as error:
            found["error"] = str(error)
        yield found


def output_of(case: dict[str, Any]) -> list[int]:
    """Return the shape of the result of a case."""
    with torch.device("meta"):
        pair = (case["inside"], case["outside"]) if case["transposed"] else (case["outside"], case["inside"])
        weight = torch.empty(pair[0], pair[1] // case["groups"], *case["kernel"])
        data = torch.empty(case["batch"], case["inside"], *case["places"])
        where = case["stride"], case["padding"], case["dilation"], case["transposed"], [0] * len(case["places"])
        return list(torch.ops.aten.convolution(data, weight, None, *where, case["groups"]).shape)


def properties(cudnn: backend.Backend, handle: Any) -> dict[str, str]:
    """Return the GPU as cuDNN serialises it, asked by its handle and by its number."""
    found = {}
    for name, attribute, kind, value in (
        ("handle", backend.Attribute.DEVICE_HANDLE, backend.Type.HANDLE, handle),
        ("number", backend.Attribute.DEVICE_ID, backend.Type.INT32, 0),
    ):
        try:
            made = cudnn.descriptor(backend.Kind.DEVICE).set(attribute, kind, value).finalize()
            found[name] = made.text(backend.Attribute.DEVICE_JSON)
        except backend.BackendError as error:
            found[f"{name} error"] = str(error)
    return found


def log_of(cases: list[dict[str, Any]]) -> str:
    """Return cuDNN's log of the calls that PyTorch makes for a few cases."""
    with tempfile.TemporaryDirectory() as folder:
        script = (
            f"import sys, json; sys.path.insert(0, {str(Path(measured.__file__).parent)!r}); import workspaces as m\n"
            "for case in json.loads(sys.stdin.read()): print(m.measured_convolution(case))"
        )
        file = Path(folder) / "cudnn.log"
        told = {"CUDNN_LOGLEVEL_DBG": "3", "CUDNN_LOGDEST_DBG": str(file)}
        subprocess.run(
            [sys.executable, "-c", script], input=json.dumps(cases), text=True, env={**os.environ, **told}, timeout=60,
            check=False,
        )  # fmt: skip
        text = file.read_text(errors="replace") if file.exists() else "no log"
    return text[:1_500_000]


def lines(options: argparse.Namespace) -> Any:
    """Yield the lines of the result."""
    begin = time.monotonic()
    torch.zeros(1, device="cuda")
    cudnn = backend.Backend(options.library or library())
    handle = cudnn.handle()
    told = properties(cudnn, handle)
    yield {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cudnn": cudnn.version, "properties": told,
        "torch properties": str(torch.cuda.get_device_properties(0)),
    }  # fmt: skip
    text = told.get("handle") or told.get("number")
    device = None
    if text:
        device = cudnn.descriptor(backend.Kind.DEVICE).set_text(backend.Attribute.DEVICE_JSON, text).finalize()
    stored = [] if options.fresh else sampled()
    fresh = measured.convolutions(1500, random.Random(options.seed))
    for number, case in enumerate([*stored, *fresh]):
        if time.monotonic() - begin > options.seconds:
            break
        line: dict[str, Any] = {**case, "source": "sample" if number < len(stored) else "fresh"}
        try:
            line["allocated"] = measured.measured_convolution(case)
            case["output"] = line["allocated"]["output"]
            line["by handle"] = answers(case, cudnn, handle)
            line["without device"] = answers(case, cudnn, device) if device else None
        except Exception as error:
            line["error"] = f"{type(error).__name__}: {str(error)[:200]}"
            torch.cuda.empty_cache()
        yield line
    if options.fresh:
        return
    chosen = [case for case in stored if len(case["places"]) == 2 and not case["transposed"]][:LOGGED]
    try:
        yield {"log": log_of(chosen)}
    except Exception as error:
        yield {"log error": str(error)[:300]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--library", type=Path, help="the file of cuDNN (default: the one that PyTorch loads)")
    parser.add_argument("--seed", type=int, default=1316, help="of the random calls")
    parser.add_argument("--fresh", action="store_true", help="leave out the stored calls and the log")
    parser.add_argument("--benchmark", action="store_true", help="try all plans, as cudnn.benchmark does")
    parser.add_argument("--seconds", type=float, default=120, help="after which no case starts (default: 120)")
    parser.add_argument("--plans", help="list the plans of one part of the calls, 0/4 is the first of four")
    options = parser.parse_args()
    opened = gzip.open if options.out.suffix == ".gz" else open
    with opened(options.out, "wt", encoding="utf-8") as file:
        for line in (listed if options.plans else benchmarked if options.benchmark else lines)(options):
            file.write(json.dumps(line) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
