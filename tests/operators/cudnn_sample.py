"""The stored sample of random calls of cuDNN, as measured on an H200."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import torch

from trainatomy.operators.allocation.cudnn.convolution import Convolution, Kind

SAMPLE = Path(__file__).parents[1] / "data" / "workspaces-h200.json.gz"
KINDS: tuple[Kind, Kind, Kind] = ("forward", "input gradient", "weight gradient")


def sample(kind: str) -> list[dict[str, Any]]:
    """Return the lines of the sample."""
    with gzip.open(SAMPLE, "rt", encoding="utf-8") as file:
        lines = [json.loads(line) for line in file][1:]
    return [line for line in lines if line["kind"] == kind]


def convolution_of(line: dict[str, Any]) -> Convolution:
    """Return the convolution of a line; for a transposed one, the convolution whose gradient it is."""
    data = (line["batch"], line["inside"], *line["places"])
    output, ends = tuple(line["output"]), (line["outside"], line["inside"])
    if line["transposed"]:
        data, output, ends = output, data, ends[::-1]
    weight = (ends[0], ends[1] // line["groups"], *line["kernel"])
    settings = [line["stride"], line["padding"], line["dilation"]]
    if len(data) == 3:
        data, weight, output = (torch.Size((*shape[:2], 1, *shape[2:])) for shape in (data, weight, output))
        settings = [[neutral, *values] for neutral, values in zip((1, 0, 1), settings, strict=True)]
    shapes = torch.Size(data), torch.Size(weight), torch.Size(output)
    how = line["groups"], line["transposed"], line["last"]
    return Convolution(*shapes, getattr(torch, line["dtype"]), settings[0], settings[1], settings[2], *how, 132)
