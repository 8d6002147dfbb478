"""What a training costs per hour: the prices of ``--price``, or the list price of its machine."""

from __future__ import annotations

from collections.abc import Mapping

from typer import BadParameter

from trainatomy.catalog.gpus import find_gpu
from trainatomy.catalog.instances import Instance, find_instance, is_instance


def cost_per_hour(
    prices: Mapping[str, float], gpu: str, gpus: int = 1, machine: Instance | None = None, machines: int = 1
) -> tuple[float | None, str]:
    """Return the price of all GPUs of a training and what it is: as given, or as listed for its machine.

    Prices that are given for others are refused.
    """
    costs = {find_instance(name).id if is_instance(name) else find_gpu(name).id: cost for name, cost in prices.items()}
    if machine is not None and machine.id in costs:
        return costs[machine.id] * machines, "the given price"
    if gpu in costs:
        return costs[gpu] * gpus, "the given price"
    if costs:
        wanted = gpu if machine is None else f"{gpu} on {machine.id}"
        raise BadParameter(f"--price: names {', '.join(costs)}, and the prediction is for {wanted}")
    if machine is None or machine.usd_per_hour is None:
        return None, ""
    listed = f"{machine.usd_per_hour:,.2f} USD an hour for {machine.id} ({machine.price_region}, {machine.price_date})"
    return machine.usd_per_hour * machines, listed
