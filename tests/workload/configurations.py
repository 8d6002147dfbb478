"""Configurations of other frameworks in files: what they say, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainatomy.errors import WorkloadError
from trainatomy.workload.reading import read, read_raw


def written(folder: Path, text: str, name: str = "train.yaml") -> str:
    """Write a configuration, and return its path."""
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def said(folder: Path, text: str) -> dict[str, Any]:
    """Return the workload that a configuration says, as a raw mapping."""
    (raw,) = read_raw(written(folder, text))
    return dict(raw.mapping)


def problem(folder: Path, text: str) -> str:
    """Return what is wrong with a configuration, without the path of its folder."""
    with pytest.raises(WorkloadError) as caught:
        read(written(folder, text))
    return str(caught.value).replace(str(folder), "")
