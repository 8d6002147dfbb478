"""The answers of real H200s as NVML's binding: one, idle or under load, and two with NVLink, idle."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("h200.json").read_text())
TWO: dict[str, Any] = json.loads(Path(__file__).with_name("two-h200.json").read_text())


class RecordedNvml:
    """Answers what was recorded; handles are indices, and everything else is not supported."""

    class NVMLError(Exception):
        """What NVML raises."""

    def __init__(self, moment: str, recorded: Mapping[str, Any] = RECORDED) -> None:
        self.asked: set[str] = set()
        self.answers = {**recorded["nvml"]["once"], **recorded["nvml"][moment]}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        if name == "nvmlMemory_v2":  # a number, not a call: the second version was not recorded
            raise AttributeError(name)
        self.asked.add(name)
        if name in ("nvmlInit", "nvmlShutdown"):
            return lambda: None
        if name == "nvmlDeviceGetHandleByIndex":
            return lambda index: index

        def call(*arguments: Any) -> Any:
            try:
                return opened(self.answers[f"{name}({', '.join(map(str, arguments))})"])
            except KeyError:
                raise self.NVMLError("Not Supported") from None

        return call


def opened(answer: Any) -> Any:
    """Return structures as objects with attributes."""
    if isinstance(answer, dict):
        return SimpleNamespace(**answer)
    return [opened(each) for each in answer] if isinstance(answer, list) else answer
