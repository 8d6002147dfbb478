"""The fit of the host's costs: parts of an observation are what the step costs, and known multipliers are found."""

from __future__ import annotations

import importlib
import sys
from math import exp
from pathlib import Path
from random import Random
from typing import Any

import pytest

from trainatomy.catalog.hosts import reference_host
from trainatomy.simulator.simulate import simulate
from trainatomy.timing.host_costs import cpu_costs
from trainatomy.timing.launch import cpu_seconds_by_phase
from trainatomy.workload.schema import Workload

FOLDER = Path(__file__).parents[2] / "benchmarks" / "timing"
CONFIG = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64, "n_positions": 16}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module


def test_the_parts_of_a_step_are_what_it_costs(script: Any) -> None:
    train = {"per_device_train_batch_size": 1, "gradient_checkpointing": True, "gradient_accumulation_steps": 2}
    model = {"class": "GPT2LMHeadModel", "config": CONFIG}
    workload = Workload.from_mapping({"gpu": "h200", "model": model, "data": {"sequence_length": 8}, "train": train})
    operations = simulate(workload, workload.resolve_gpu()).operations
    parts = script("host_observations").parts_of(operations, "trainer")
    whole = cpu_seconds_by_phase(operations, cpu_costs(reference_host().microseconds), "trainer")
    for phase in ("forward", "backward", "optimizer", "other"):
        batch = whole["batch"] if phase in ("forward", "other") else 0.0  # copies are in the phase that makes them
        assert sum(parts[phase].values()) * 1e-6 == pytest.approx(whole[phase], abs=batch + 1e-9)
    assert sum(sum(one.values()) for one in parts.values()) * 1e-6 == pytest.approx(sum(whole.values()))
    costs = reference_host().microseconds
    assert parts["forward"]["forward_pass"] == 2 * costs["forward_pass"]
    assert parts["backward"]["recomputed"] > 0 and parts["forward"]["graph.matmul"] > 0


def test_known_multipliers_and_slow_visits_are_found(script: Any) -> None:
    draw, true = Random(0), {"graph.view": 1.2, "backward.view": 0.8, "forward_pass": 2.0}
    observations = []
    for number in range(200):
        parts = {name: draw.uniform(100, 1000) for name in true} | {"rest": draw.uniform(0, 500)}
        slow, noise = 1.1 if number % 4 == 0 else 1.0, draw.gauss(1, 0.02)
        us = sum(value * true.get(name, 1.0) for name, value in parts.items())
        about = {"name": f"{number}", "family": f"{number % 20}", "visit": f"{number % 4}", "gpu": "h200"}
        observations.append({**about, "share": 1.0, "pace": 1.5, "us": us * 1.5 * slow * noise, "parts": parts})
    refit = script("host_refit")
    logarithms = refit.fit(observations)
    found = {name: exp(value) for name, value in logarithms.items()}
    assert found == pytest.approx(true, rel=0.1), "the pull towards today's costs leaves a part"
    errors = [abs(refit.error_of(one, logarithms)) for one in observations if one["visit"] != "0"]
    assert sorted(errors)[len(errors) // 2] < 0.03
    assert {refit.fold_of(f"family {number}", 6) for number in range(200)} == set(range(6))
