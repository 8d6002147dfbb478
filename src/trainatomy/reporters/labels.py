"""Titles, colours and letters of everything that is reported: one home for text, JSON, charts and HTML.

Sentences are in ``sentences.py``, titles of a search in ``settings.py``.  Text styles are those of rich; chart
colours are hexadecimal.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ComponentLabel:
    """Label of a memory component: title, letter in bars of text, rich style, colour in charts."""

    title: str
    letter: str
    style: str
    colour: str


COMPONENTS = {
    "weights": ComponentLabel("weights", "W", "blue", "#2f5d8c"),
    "optimizer_states": ComponentLabel("optimizer states", "O", "magenta", "#7c5aa6"),
    "gradients": ComponentLabel("gradients", "G", "cyan", "#3aa6a0"),
    "activations": ComponentLabel("activations", "A", "green", "#6cae5c"),
    "temporary": ComponentLabel("temporary buffers", "T", "yellow", "#e9b44c"),
    "functionality": ComponentLabel("inputs and workspaces", "I", "bright_blue", "#d9775f"),
    "cache": ComponentLabel("cache and fragmentation", "C", "bright_black", "#c3cad3"),
    "context": ComponentLabel("context and kernels", "K", "white", "#8d97a5"),
}
"""Labels by the names of ``Components``, in display order: tensors in colour, cache and context in grey."""

OTHER_COMPONENTS = {
    "gathered_outputs": ComponentLabel("outputs gathered by evaluation", "E", "bright_green", "#9ac78d"),
    "key_value_cache": ComponentLabel("keys and values", "K", "bright_yellow", "#d9c36a"),
    "gathered_weights": ComponentLabel("gathered weights", "H", "bright_cyan", "#86b3d9"),
    "communication_buffers": ComponentLabel("communication buffers", "B", "bright_magenta", "#b05c8f"),
    "nccl": ComponentLabel("NCCL (outside PyTorch)", "N", "bright_white", "#6b7683"),
}
"""Labels of the components that only training runs on several GPUs have."""


def component(name: str) -> ComponentLabel:
    """Return the label of a component; one that is not standard is shown by its name."""
    known = COMPONENTS.get(name) or OTHER_COMPONENTS.get(name)
    return known or ComponentLabel(name.replace("_", " "), "+", "bright_magenta", "#b05c8f")


VERDICT_STYLES = {"fits": "bold green", "tight": "bold yellow", "does not fit": "bold red"}
STATUS_STYLES = {
    "completed": "green",
    "out of memory": "bold red",
    "failed": "bold red",
    "not measured": "dim",
}
SEVERITY_STYLES = {"error": "bold red", "warning": "bold yellow", "note": "cyan"}
BASIS_STYLES = {"measured": "green", "computed": "", "assumed": "yellow"}

DEVICE_TOTAL = "total (as in nvidia-smi)"
DEVICE_AT_LEAST = "total (at least)"
"""Where nothing is known of what a process holds outside the allocator."""
LOGITS_AND_LOSS = "  of which logits and loss"
LOADED_AT_LEAST = "  on the GPU (at least)"
LOADED_TOTAL = "  in nvidia-smi (with context)"

SECTIONS = {
    "peak": "GPU memory at the peak",
    "measured_peak": "Measured GPU memory at the peak",
    "measured_failure": "Measured GPU memory at the failure",
    "predicted_peak": "Predicted GPU memory at the peak (not both records have a measured breakdown)",
    "ranks": "GPU memory by rank",
    "script": "The script",
    "measured_ranks": "Ranks",
    "counters": "PyTorch's own counters",
    "modules": "Activations at the peak, by module",
    "evaluation": "Evaluation",
    "generation": "Generation",
    "checkpoint": "Checkpoint",
    "experts": "Mixture of experts: memory against compute",
    "measured_modules": "Measured activations at the peak, by module",
    "timeline": "Memory allocated over the steps, at the peak of each phase",
    "stages": "Memory by stage",
    "totals": "Totals",
    "measured_totals": "Measured totals",
    "lengths": "Samples of different lengths",
    "step_time": "Time per step",
    "time": "Time",
    "host_pace": "Pace of the host",
    "loader": "By number of workers",
    "calibrated_host": "Load of the host meanwhile",
    "data_wait": "Waiting for data",
    "power": "Power and heat",
    "speed": "Time and throughput",
    "nvml": "NVML's figures",
    "other_processes": "Other processes on the GPU",
    "failure": "What happened",
    "changes": "What changed",
    "prediction": "Compared with the prediction",
    "published": "Compared with published figures",
    "out_of_memory": "Out of memory",
    "failed": "Failed",
    "not_predicted": "Not predicted",
    "not_measured": "Not measured",
    "collectives": "Collectives between GPUs",
    "groups": "Operations by group",
    "group_times": "GPU time by group",
    "published_shares": "Compared with published shares",
    "operation_collectives": "Communication between GPUs",
    "operations": "Heaviest operations",
    "heavy_modules": "Heaviest modules",
    "rules": "Rules of the guides, for this model",
    "shapes": "Matrix products with inefficient shapes",
    "paddings": "Sizes worth padding",
    "left_out": "Not included in these figures",
    "match": "Match between prediction and profile",
    "doctor_gpus": "GPUs",
    "doctor_topology": "Connections between GPUs",
    "doctor_watched": "The running training",
    "doctor_machine": "Software and host",
    "facts": "Inputs and their sources",
    "notes": "Notes",
    "fit_changes": "Changes to the workload as given",
    "fit_runners_up": "Next fastest",
    "fit_others": "The largest with other settings",
    "fit_ties": "Too close to call",
    "fit_prices": "What each single change would cost or save",
    "fit_batches": "Batch sizes, all other settings as in the answer",
    "fit_gpus": "The best on each number of GPUs",
    "fit_limits": "Limits",
    "fit_search": "The search",
    "fit_remedies": "Steps that would make it fit",
    "fit_memory": "What holds the memory",
    "fit_measured": "Predicted and measured",
    "fit_refused": "GPUs that cannot run it",
    "fit_python": "Settings in Python",
    "fit_launch": "Command that starts it",
    "fit_yaml": "Settings as a workload file",
    "fit_flags": "Settings as options of trainatomy",
}
"""Titles of the sections of reports."""

COLUMNS = {
    "component": "component",
    "size": "size",
    "measured": "measured",
    "bytes": "bytes",
    "predicted": "predicted",
    "gap": "gap",
    "of_total": "of total",
    "gap_of_total": "gap, of total",
    "device": "in nvidia-smi",
    "added": "added",
    "reserved": "reserved by PyTorch",
    "allocated": "allocated",
}
"""Column heads of tables of memory."""

ROOT_MODULE = "(the model itself)"

COUNTERS = {
    "peak_allocated_bytes": "max_memory_allocated",
    "peak_reserved_bytes": "max_memory_reserved",
    "peak_requested_bytes": "requested, before rounding",
    "model_bytes": "model after loading",
}
"""PyTorch's own counters, by the names of ``Memory``."""

FIGURES = {
    "device_bytes": "device memory",
    "peak_reserved_bytes": "peak reserved",
    "peak_allocated_bytes": "peak allocated",
    "model_bytes": "model after loading",
    "process_bytes": "process, as NVML reports it",
    "nvml_used_bytes": "GPU in use (first NVML call)",
    "idle_bytes": "in use before the first tensor",
    "context_bytes": "added by the first tensor",
    "step_seconds": "time per step",
    "samples_per_second": "samples per second",
    "tokens_per_second": "tokens per second",
}
"""Figures of a measurement, by the names of ``Measurement``."""

NVML_FIGURES = {
    "nvml_used_bytes": "GPU in use (first version of the call)",
    "idle_bytes": "before the first tensor: the driver's reservation",
    "context_bytes": "added by the first tensor: the CUDA context",
    "process_bytes": "process, as NVML reports it",
    "uncounted_bytes": "context memory that NVML counts for no process",
    "device_bytes": "device memory, as in nvidia-smi",
}
"""NVML's figures of a measurement, by the names of ``Measurement``."""

TIMES = {
    "gpu_seconds": "GPU time",
    "communication": "communication",
    "exposed": "  of it exposed",
    "slowed": "  slows kernels by",
    "scaling": "scaling efficiency",
    "bubble": "pipeline bubble",
    "host_seconds": "CPU time",
    "slow_host": "on a slow host",
    "power": "power",
    "flop_per_second": "FLOP per second",
    "model_flop_utilisation": "model FLOP utilisation",
    "priced_by": "kernel times from",
    "general_rule_only": "by memory traffic only",
}
"""Figures of a predicted step, by the names of ``results.time.Time``."""

CLOCK_REASONS = {
    "idle": "idle",
    "clock setting": "clocks set by the administrator",
    "power cap": "power cap",
    "hardware slowdown": "hardware slowdown",
    "sync boost": "clocks kept equal with other GPUs",
    "thermal": "heat",
    "hardware thermal": "heat (by the hardware)",
    "power brake": "power brake of the machine",
    "display clock setting": "clocks set by the display",
}
"""Reasons for which the driver lowers the clock, by ``results.power.ClockReason``."""

SETUP = {"gpu": "GPU", "driver": "driver", "versions": "library versions"}
"""Parts of the setup that two records can differ in, by the names of ``results.difference.About``."""

FACTS = {
    "simulated_steps": "simulated steps",
    "allocations": "simulated allocations",
    "allocator": "allocator settings",
    "gpu_memory": "GPU memory",
    "context": "context and kernels",
    "convolutions": "workspaces of convolutions",
    "link": "link between GPUs",
    "network": "link between machines",
    "nccl": "NCCL's memory",
}
"""Titles of the facts that a prediction rests on."""

BOUNDS = {
    "arithmetic": "compute-bound",
    "memory bandwidth": "bound by memory bandwidth",
    "host": "CPU-bound (kernel launch)",
    "communication": "bound by communication",
    "transfers": "bound by copies between CPU and GPU",
}
"""Limits of a step, by the names of ``results.time.Bound``."""

LIMITS = {
    "arithmetic": "compute",
    "memory bandwidth": "memory bandwidth",
    "host": "CPU",
    "communication": "communication",
    "transfers": "CPU-GPU copies",
}
"""The same in one or two words, for a column of a table."""

PHASES = {
    "step": "whole step",
    "recompute": "recomputation",
    "zero_grad": "zeroing gradients",
    "other": "between phases",
}
"""Phases whose name does not say enough; any other is shown by its name."""

GROUPS = {
    "contraction": "tensor contractions",
    "normalisation": "statistical normalisations",
    "elementwise": "element-wise operators",
    "communication": "communication between GPUs",
}
"""Groups of operators, as named by Ivanov et al. (arXiv 2007.00072), and what they have no group for."""

SHORT_GROUPS = {
    "contraction": "contractions",
    "normalisation": "normalisations",
    "elementwise": "element-wise",
    "communication": "communication",
}

CALIBRATION = {
    "TFLOP/s": "Arithmetic",
    "TB/s": "Memory bandwidth",
    "µs": "Fixed costs",
    "times the reference host": "CPU",
}
"""Titles of the tables of a calibration, by the unit of the findings."""

AXES = {
    "memory": "GiB of device memory",
    "throughput": "samples per second",
    "total_throughput": "samples per second, all GPUs",
    "gpus": "GPUs",
    "fullest_rank": "GiB of device memory, fullest GPU",
    "cost": "cost per million samples",
    "step_time": "ms per step",
    "steps": "step",
    "reserved": "GiB reserved",
}
MARKS = {
    "predicted": "predicted",
    "published": "published",
    "total": "total",
    "out_of_memory": "held when out of memory",
    "ideal": "ideal scaling",
}
"""Axes and legends of charts; components are in ``COMPONENTS``."""

INK, MUTED, GRID, PAPER, ALARM = "#1f2933", "#66707d", "#e4e7eb", "#ffffff", "#c0392b"
THROUGHPUT, HIGHLIGHT = "#3d6fa5", "#e9b44c"
PLANS = ("#3d6fa5", "#d9775f", "#6cae5c", "#7c5aa6", "#e9b44c", "#3aa6a0")
"""Colours of charts that belong to no component; ``PLANS`` are those of lines."""
