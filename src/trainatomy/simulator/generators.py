"""Generators of random numbers of the simulated GPU: a CPU build of PyTorch cannot make one."""

from __future__ import annotations

from typing import Any

import torch


class _AnyGenerator(type(torch._C.Generator)):  # type: ignore[misc]
    """Lets PyTorch's own generators be instances of the class that takes their place."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch._C.Generator)


class SimulatedGenerator(torch._C.Generator, metaclass=_AnyGenerator):
    """``torch.Generator`` in a simulated process: one of the GPU has its state on the host, and draws nothing there."""

    _device: torch.device

    def __new__(cls, device: Any = "cpu") -> Any:
        """Return a generator of a device."""
        made = torch._C.Generator.__new__(cls, "cpu")  # type: ignore[call-arg]
        made._device = torch.device(device)
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device whose numbers it draws."""
        kind = self._device.type
        return torch.device(kind, self._device.index or 0) if kind == "cuda" else self._device

    def clone_state(self) -> SimulatedGenerator:
        """Return a copy."""
        made: SimulatedGenerator = type(self)(self._device)
        made.set_state(self.get_state())
        return made

    def graphsafe_get_state(self) -> SimulatedGenerator:
        """Return itself: its state is on the host."""
        return self

    def graphsafe_set_state(self, state: torch._C.Generator) -> SimulatedGenerator:
        """Change nothing."""
        return self
