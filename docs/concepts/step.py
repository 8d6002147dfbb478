"""Numbers and tables of docs/time.md: command output, predicted kernel times, and their data."""

from __future__ import annotations

from functools import cache
from importlib import metadata

from concepts import step_measured
from concepts.page import page, table
from trainatomy.api import ops, predict
from trainatomy.catalog.calibrations import from_text, shipped
from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.gpus import find_gpu, gpus
from trainatomy.catalog.machines import reference_host
from trainatomy.reporters.text.operations import operations_page
from trainatomy.reporters.text.prediction import prediction_page
from trainatomy.reporters.text.rendering import render
from trainatomy.results.operations import GroupShare, OperationBreakdown
from trainatomy.results.prediction import Prediction
from trainatomy.results.time import Time
from trainatomy.timing.cost_model import cost_model_of, gap_seconds, kernel_cost
from trainatomy.timing.one_stream import LAUNCH_QUEUE_DEPTH
from trainatomy.workload import Workload
from trainatomy.workload.builtin import encoder_layer

GPU_ID = "h200"
MODEL, LENGTH = "google-bert/bert-base-uncased", 128
BATCHES = (1, 16, 64, 256)
COMMAND = (
    f"--model {MODEL} --sequence-length {LENGTH} --per-device-train-batch-size {BATCHES[-1]} --bf16 --gpu {GPU_ID}"
)
"""Options of `predict` for the largest batch."""
WIDTH = 100
"""Columns of command output, as in a terminal of unknown width."""
VOCABULARY = {50257: "GPT-2's", 50258: "even", 50264: "a multiple of 8", 50304: "a multiple of 64"}
BOUNDS = {"host": "CPU", "arithmetic": "GPU (arithmetic)", "memory bandwidth": "GPU (bandwidth)"}
"""Names of ``Time.bound_by``."""
OTHERS = ("v100-16gb", "rtx-4090", "a100-80gb", "h100-sxm", "b200")


def time_page() -> str:
    """Render docs/time.md."""
    anatomy = layer(GPU_ID)
    host = reference_host()
    calibration = shipped()[GPU_ID]
    smallest, largest = predicted(BATCHES[0]), predicted(BATCHES[-1])
    return page(
        "time.md",
        {
            "gpu": find_gpu(GPU_ID),
            "operations": sections(render(operations_page(anatomy), WIDTH), "GPU time by group"),
            "parts": whole_step(anatomy),
            "ridge": find_gpu(GPU_ID).rates["fp16"] / find_gpu(GPU_ID).bandwidth_bytes_per_second,
            "command": COMMAND,
            "answer": paragraph(render(prediction_page(largest), WIDTH), "a step of "),
            "spent": sections(render(prediction_page(largest), WIDTH), "Time per step"),
            "batches": batches_table(),
            "first": timed(smallest),
            "host": host,
            "us": host.microseconds,
            "gap": gap_seconds(calibration) * 1e6,
            "queue": LAUNCH_QUEUE_DEPTH,
            "intervals": intervals_table(),
            "hosts": read_yaml("intervals.yaml")["hosts"],
            "attainable": attainable(),
            "others": [one for one in gpus() if one.id in OTHERS],
            "vocabulary": vocabulary_table(),
            "padding": step_measured.padding_table(),
            "extrapolation": step_measured.extrapolation(),
            "environment": calibration.environment,
            "versions": {name: metadata.version(name).partition("+")[0] for name in ("torch", "transformers")},
        },
    )


@cache
def layer(name: str) -> OperationBreakdown:
    """Return the operations of the published encoder layer, as ``trainatomy ops encoder-layer --gpu NAME`` does."""
    return ops(Workload.from_mapping(encoder_layer().to_mapping() | {"gpu": name}))


@cache
def predicted(batch: int) -> Prediction:
    """Predict BERT-base with this batch size."""
    train = {"per_device_train_batch_size": batch, "bf16": True}
    described = {"model": {"id": MODEL}, "data": {"sequence_length": LENGTH}, "train": train, "gpu": GPU_ID}
    return predict(Workload.from_mapping(described))


def timed(prediction: Prediction) -> Time:
    """Return the time of a prediction, which is never missing for current software."""
    assert prediction.time is not None
    return prediction.time


def attainable() -> float:
    """Return the share of the data sheet's peak that large products reach on this GPU."""
    time = timed(predicted(BATCHES[-1]))
    assert time.model_flop_utilisation and time.attainable_utilisation
    return time.model_flop_utilisation / time.attainable_utilisation


def sections(output: str, *titles: str) -> str:
    """Return the sections of a command's output with these titles, separated by empty lines."""
    found: dict[str, list[str]] = {}
    title = ""
    for row in output.splitlines():
        if row and not row.startswith(" "):
            title = row
        found.setdefault(title, []).append(row)
    return "\n\n".join("\n".join(found[title]).rstrip() for title in titles)


def paragraph(output: str, beginning: str) -> str:
    """Return the lines of a command's output from the one with this beginning up to the next empty line."""
    rows = output.splitlines()
    first = next(number for number, row in enumerate(rows) if row.startswith(beginning))
    return "\n".join(rows[first : rows.index("", first)])


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds: ``0.02405`` -> ``24.1 ms``."""
    return f"{seconds * 1e3:.1f} ms"


def batches_table() -> str:
    """Tabulate the time of a step on both timelines by batch size."""
    rows = []
    for batch in BATCHES:
        time = timed(predicted(batch))
        low, high = time.interval_seconds
        both = (milliseconds(time.gpu_seconds), milliseconds(time.host_seconds), milliseconds(time.step_seconds))
        span = f"{low * 1e3:.0f} to {high * 1e3:.0f} ms"
        used = f"{100 * (time.model_flop_utilisation or 0):.1f} %"
        rows.append((str(batch), BOUNDS[time.bound_by], *both, span, f"{time.samples_per_second:,.0f}", used))
    head = ("batch", "bound by", "GPU time", "CPU time", "step", "9 in 10", "samples/s", "MFU")
    return table(head, rows, 6)


_BOUNDS_OF_INTERVALS = {"gpu": "the GPU", "convolutions": "the GPU, much of it convolutions", "host": "the CPU"}


def intervals_table() -> str:
    """Tabulate the 9-in-10 intervals by the source of the kernel times and by what bounds the step."""
    rows = [
        (basis, _BOUNDS_OF_INTERVALS[bound], *(f"{limit:.2f}" for limit in limits))
        for basis, found in read_yaml("intervals.yaml").items()
        for bound, limits in found.items()
        if bound in _BOUNDS_OF_INTERVALS and basis != "hosts"
    ]
    return table(("kernel times from", "bound by", "at least", "at most"), rows, 2)


def whole_step(anatomy: OperationBreakdown) -> dict[str, GroupShare]:
    return {row.group: row for row in anatomy.groups if row.phase == "step"}


def _product(m: int, n: int, k: int) -> float:
    """Predict the seconds of a product [m, k] x [k, n] in bfloat16."""
    call = from_text(f"aten::mm(bf16[{m},{k}],bf16[{k},{n}])->bf16[{m},{n}]")
    return kernel_cost(call, cost_model_of(find_gpu(GPU_ID))).seconds


def _product_row(label: str, m: int, n: int, k: int) -> tuple[str, ...]:
    seconds = _product(m, n, k)
    return label, f"{seconds * 1e6:,.0f} µs", f"{2 * m * n * k / seconds / 1e12:,.0f}"


def vocabulary_table() -> str:
    """Tabulate the last product of a GPT-2 by the size of its vocabulary."""
    rows = [_product_row(f"{size:,}: {what}", 8192, size, 768) for size, what in VOCABULARY.items()]
    return table(("vocabulary", "predicted", "TFLOP/s"), rows, 2)
