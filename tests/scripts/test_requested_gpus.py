"""Frameworks that ask for several GPUs in one process are followed as one of as many ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_types import RunScript

PARSER = """
def _sanitize_gpu_ids(gpus, include_cuda=False, include_mps=False):
    import torch
    if max(gpus) >= torch.cuda.device_count():
        raise RuntimeError("your machine has fewer")
    return gpus
"""
SELECT = """
def select_device(device="", newline=False, verbose=True):
    return device
"""


def write(folder: Path, module: str, text: str) -> None:
    file = folder.joinpath(*module.split(".")).with_suffix(".py")
    file.parent.mkdir(parents=True)
    file.write_text(text)


@pytest.mark.parametrize(
    ("module", "text", "call"),
    [
        ("lightning_fabric.utilities.device_parser", PARSER, "_sanitize_gpu_ids(gpus=[0, 1, 2, 3], include_cuda=True)"),
        ("ultralytics.utils.torch_utils", SELECT, "select_device('0,1,2,3')"),
        ("ultralytics.utils.torch_utils", SELECT, "select_device(device=[0, 1, 2, 3])"),
        ("ultralytics.utils.torch_utils", SELECT, "select_device('[0, 1, 2, 3]')"),
    ],
)
@pytest.mark.parametrize("gpus", [None, 4])
def test_more_gpus_than_there_are(
    run_script: RunScript, tmp_path: Path, module: str, text: str, call: str, gpus: int | None
) -> None:
    write(tmp_path, module, text)
    script = f"""
        import sys
        from {module} import {call.partition("(")[0]}
        del sys.modules["{module}"]
        {call}
        raise RuntimeError("so many are there")
    """
    outcome = run_script(script, gpus=gpus)
    if gpus:
        assert "so many are there" in outcome.message
    else:
        assert outcome.handover is not None
        assert outcome.handover.words == ("torchrun", "--nproc-per-node=4", "train.py")
