"""What the CPU takes to launch the kernels of recurrent networks: by time step, layers and pace."""

from __future__ import annotations

import pytest

from trainatomy.catalog.calibrations import from_text
from trainatomy.catalog.machines import reference_host
from trainatomy.operators.cost import recurrence
from trainatomy.timing.host_costs import cpu_costs
from trainatomy.timing.launch import seconds_within

KNOWN = reference_host()
COSTS = cpu_costs(KNOWN.microseconds)


def network(steps: int, layers: int = 1, directions: int = 1, hidden: int = 512, batch: int = 8) -> str:
    """Return a forward pass in fp16; all layers read as many numbers as they have, for simplicity."""
    weights = ",".join([f"f16[{4 * hidden},{hidden}]*2,f16[{4 * hidden}]*2"] * layers * directions)
    states = f"f16[{layers * directions},{batch},{hidden}]*2"
    data = f"f16[{steps},{batch},{hidden}]"
    return f"aten::_cudnn_rnn({data},{states},{weights})->{data},{states};mode=LSTM;bidirectional={directions == 2}"


def seconds(steps: int, **shape: int) -> float:
    return seconds_within(from_text(network(steps, **shape)), COSTS)


def test_each_time_step_is_launched_and_takes_longer_above_another_layer() -> None:
    each = COSTS.recurrent_launch["forward"]
    of_step = each["step"] + 2 * each["kernel"]
    assert seconds(90) - seconds(50) == pytest.approx(40 * of_step)
    assert seconds(90, directions=2) - seconds(50, directions=2) == pytest.approx(80 * of_step)
    stacked = seconds(96, layers=2) - seconds(64, layers=2)  # both in four parts
    assert stacked == pytest.approx(64 * of_step + 32 * each["follower"])
    both = seconds(96, layers=2, directions=2) - seconds(64, layers=2, directions=2)
    assert both == pytest.approx(128 * of_step + 64 * 2 * each["follower"])  # each waits for both below


def test_each_part_of_a_stacked_layers_inputs_is_launched() -> None:
    """Behind a batch of more than 32 the inputs of 8 steps are multiplied at a time, else those of a quarter."""
    each = COSTS.recurrent_launch["forward"]
    parts = {batch: recurrence.launched_parts(from_text(network(96, 2, batch=batch))) for batch in (8, 48)}
    assert parts == {8: 2 * 3, 48: 2 * 11}
    longer = seconds(96, layers=2, batch=48) - seconds(96, layers=2, batch=8)
    assert longer == pytest.approx((parts[48] - parts[8]) * (each["kernel"] + each["part"]))
    assert recurrence.launched_parts(from_text(network(96, 1, batch=48))) == 0


def test_fused_layers_launch_no_time_steps() -> None:
    assert recurrence.launched_steps(from_text(network(90, hidden=128))) == (0, 0)
    assert seconds(90, hidden=128) == seconds(50, hidden=128) < seconds(50) / 10


def test_launches_inside_grow_less_than_the_pace() -> None:
    slow = cpu_costs(KNOWN.microseconds, None, 2.0, KNOWN.recurrent_exponent)
    call = from_text(network(90))
    assert seconds_within(call, slow) == pytest.approx(2**KNOWN.recurrent_exponent * seconds_within(call, COSTS))
    assert slow.recurrent_layer["backward"] == pytest.approx(2 * COSTS.recurrent_layer["backward"])
    assert 0 < KNOWN.recurrent_exponent < 1
