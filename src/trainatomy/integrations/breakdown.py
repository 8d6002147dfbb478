"""The bill of a window of somebody's own training: settled as every real run is, for the card and PyTorch at hand."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.catalog.versions import parse_version
from trainatomy.catalog.workspaces import workspaces
from trainatomy.measurement.process.job import ALLOCATOR_VARIABLES
from trainatomy.measurement.traces.settled import Counted, Failure, Place, RealBill, real_bill

if TYPE_CHECKING:
    from trainatomy.integrations.allocation_history import Window


def bill_of(window: Window, totals: Counted, device: int, failure: Failure | None) -> RealBill:
    """The bill at the peak or, where memory ran out, at the ``failure``."""
    properties = torch.cuda.get_device_properties(device)
    version = parse_version(torch.__version__)
    place = Place(
        AllocatorSettings.parse(options(), version),
        workspaces((properties.major, properties.minor), version),
    )
    return real_bill(window.history(), place, totals, window.followed, failure, window.segments)


def options() -> str:
    """The allocator's options, as PyTorch read them from the environment."""
    return next((os.environ[name] for name in reversed(ALLOCATOR_VARIABLES) if os.environ.get(name)), "")
