"""Links and connections of several GPUs, with a binding that answers as written here."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from trainatomy.measurement.device import state as links
from trainatomy.measurement.device.nvml import NvmlDevice
from trainatomy.results.machine import GPUPair, NVLinks

SWITCH, GPU = 2, 0


class Binding:
    """Answers by the name of the call; what is left out is not supported, as in an old driver."""

    class NVMLError(Exception):
        """What NVML raises."""

    def __init__(self, **answers: Callable[..., Any]) -> None:
        self.answers = answers

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvmlDevice") or name.removeprefix("nvmlDevice") not in self.answers:
            raise AttributeError(name)
        return self.answers[name.removeprefix("nvmlDevice")]

    def refuse(self, *arguments: Any) -> Any:
        raise self.NVMLError("Not Supported")


def gpus(binding: Binding, count: int = 2) -> tuple[NvmlDevice, ...]:
    return tuple(NvmlDevice(binding, index, f"GPU-{index}", "H100") for index in range(count))


def nvlinks(remote: int, states: tuple[int, ...]) -> Binding:
    """Return GPUs with links to a switch or to the other GPU; state 1: up, 0: down."""
    binding = Binding()

    def state(gpu: int, link: int) -> int:
        return states[link] if link < len(states) else binding.refuse()

    binding.answers = {
        "GetNvLinkState": state,
        "GetNvLinkVersion": lambda gpu, link: 6,
        "GetNvLinkRemoteDeviceType": lambda gpu, link: remote,
        "GetNvLinkErrorCounter": lambda gpu, link, counter: counter,
        "GetPciInfo": lambda gpu: SimpleNamespace(domain=0, bus=gpu, device=0),
        "GetNvLinkRemotePciInfo": lambda gpu, link: SimpleNamespace(domain=0, bus=1 - gpu, device=0),
        "GetTopologyCommonAncestor": lambda gpu, other: 50,
        "GetP2PStatus": lambda gpu, other, kind: 0,
    }
    return binding


def test_links_that_are_up_and_down_with_their_errors() -> None:
    found = links.nvlinks(gpus(nvlinks(SWITCH, (1, 1, 0)))[0])
    assert found == NVLinks((0, 1), (2,), 4, {"replay": 0, "recovery": 2, "crc": 10}, None)


@pytest.mark.parametrize("remote", [SWITCH, GPU])
def test_nvlinks_through_a_switch_or_directly(remote: int) -> None:
    (pair,) = links.pairs(gpus(nvlinks(remote, (1,) * 4)))
    assert pair == GPUPair(0, 1, "NV4", True)


def test_links_to_a_third_gpu_do_not_count() -> None:
    binding = nvlinks(GPU, (1, 1))
    binding.answers["GetNvLinkRemotePciInfo"] = lambda gpu, link: SimpleNamespace(domain=0, bus=7, device=0)
    (pair,) = links.pairs(gpus(binding))
    assert pair.connection == "SYS"


@pytest.mark.parametrize(
    ("level", "connection"), [(10, "PIX"), (20, "PXB"), (30, "PHB"), (40, "NODE"), (50, "SYS"), (99, None)]
)
def test_connections_without_nvlink(level: int, connection: str | None) -> None:
    binding = Binding(GetTopologyCommonAncestor=lambda gpu, other: level, GetP2PStatus=lambda gpu, other, kind: 3)
    assert list(links.pairs(gpus(binding))) == [GPUPair(0, 1, connection, False)]


def test_an_old_binding_knows_nothing() -> None:
    first, second = gpus(Binding())
    assert links.nvlinks(first) == NVLinks()
    assert list(links.pairs((first, second))) == [GPUPair(0, 1, None, None)]
    assert links.near_cpus(first, 8) is None


def test_processors_near_a_gpu() -> None:
    binding = Binding(GetCpuAffinity=lambda gpu, words: [(1 << 63) | 1, 0b10][:words])
    assert links.near_cpus(gpus(binding)[0], 80) == (0, 63, 65)
