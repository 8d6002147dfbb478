"""What the simulation of a workload comes to: memory, time, and what both rest on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.analysis.breakdown import Settlement, settle, verdict
from trainatomy.analysis.rules import bytes_per_parameter
from trainatomy.analysis.timeline import timeline as over_steps
from trainatomy.libraries import installed_versions
from trainatomy.results.prediction import Basis, Fact, GPUSummary, Prediction
from trainatomy.units import human_bytes, many

if TYPE_CHECKING:
    from trainatomy.catalog.calibrations import Calibration
    from trainatomy.catalog.gpus import GPU
    from trainatomy.results.time import Time
    from trainatomy.simulator.simulate import Simulation
    from trainatomy.workload.schema import Workload


def prediction_of(
    workload: Workload,
    simulation: Simulation,
    *,
    calibration: Calibration | None,
    timed: bool,
    timeline: bool,
    started: float,
) -> Prediction:
    """Memory settled and, where ``timed``, the step timed, by ``calibration`` or what ships; ``timeline``: with memory
    over the steps; ``started``: when it all began, by ``time.perf_counter``."""
    gpu = workload.resolve_gpu()
    settings = AllocatorSettings.parse(workload.allocator, simulation.torch_version)
    context = gpu.context(_era(workload)).holding(simulation.libraries)
    settled = settle(simulation.trace, settings, gpu.memory_bytes, context)
    memory = settled.memory
    return Prediction(
        name=name_of(workload),
        workload=workload.to_mapping(),
        card=GPUSummary(gpu.id, gpu.name, gpu.memory_bytes, gpu.capability),
        fits=settled.out_of_memory is None,
        verdict=verdict(memory, gpu.memory_bytes, settled.out_of_memory),
        room_bytes=gpu.memory_bytes - memory.device_bytes,
        memory=memory,
        modules=settled.modules,
        bytes_per_parameter=bytes_per_parameter(
            workload, simulation.parameters, simulation.trainable_parameters, memory
        ),
        facts=_facts(workload, gpu, _era(workload), simulation, settled),
        notes=simulation.notes,
        out_of_memory=settled.out_of_memory,
        timeline=over_steps(simulation.trace, settled.purposes, settled.sizes) if timeline else (),
        time=_time(workload, simulation, settled, calibration) if timed else None,
        seconds_taken=time.perf_counter() - started,
        versions=installed_versions(),
        without_workspace=len(settled.forgone),
    )


def _time(workload: Workload, simulation: Simulation, settled: Settlement, calibration: Calibration | None) -> Time:
    """The step's time; that of the software of 2022 is uncertain as on a card that nobody calibrated."""
    from trainatomy.timing.step import time_of
    from trainatomy.training.throughput import samples_per_step
    from trainatomy.workload.loops import loop_of

    return time_of(
        simulation.operations,
        workload.resolve_gpu(),
        loop=loop_of(workload).cpu_costs,
        tf32=bool(workload.train.tf32),
        samples=samples_per_step(workload),
        tokens_per_sample=simulation.tokens_per_sample,
        calibration=calibration,
        driver_calls=settled.driver_calls,
        of_today=workload.era != "2022",
    )


def name_of(workload: Workload) -> str:
    """Its own, or that of its model."""
    model = workload.model
    return workload.name or str(model.id or model.class_ or model.factory)


def _facts(workload: Workload, gpu: GPU, era: str, simulation: Simulation, settled: Settlement) -> tuple[Fact, ...]:
    """What the numbers rest on."""
    version = ".".join(map(str, simulation.torch_version))
    components = settled.memory.components
    return (
        Fact(
            "step",
            f"{many(len(simulation.trace.origins), 'allocation')} in {many(simulation.steps, 'step')}",
            "computed",
            "executed on tensors without data",
        ),
        Fact(
            "allocator",
            workload.allocator or "default settings",
            "computed",
            f"a twin of PyTorch {version}'s caching allocator",
        ),
        _card_fact("card's memory", gpu.memory_bytes, gpu.source("memory_bytes")),
        _card_fact("context and kernels", components.context, gpu.source(f"contexts.{era}.first_tensor_bytes")),
    )


def _card_fact(name: str, size: int, source: str) -> Fact:
    basis: Basis = "assumed" if source.startswith(("assumed", "unknown")) else "measured"
    return Fact(name, human_bytes(size), basis, source.removeprefix("assumed: "))


def _era(workload: Workload) -> str:
    """Which of the card's contexts a process of the workload's software has."""
    return "eager-cuda-11" if workload.era == "2022" and "eager-cuda-11" in workload.resolve_gpu().contexts else "lazy"
