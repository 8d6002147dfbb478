"""``torch.compile`` in a script: the compiled step, as a workload's; what is left out is named."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from script_types import RunScript

import trainatomy
from trainatomy.catalog.versions import parse_version
from trainatomy.errors import MissingLibrary
from trainatomy.results.prediction import Prediction
from trainatomy.scripts.command import read_command, with_gpus
from trainatomy.scripts.imports import compiling
from trainatomy.scripts.job import Job

SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 32768), nn.GELU(), nn.Linear(32768, 10))

    def forward(self, x, y):
        return nn.functional.cross_entropy(self.layers(x), y)

def groups(model):
    weights = [p for p in model.parameters() if p.dim() > 1]
    return [{"params": weights}, {"params": [p for p in model.parameters() if p.dim() == 1]}]

if __name__ == "__main__":
    model = Net().to("cuda")
    optimizer = torch.optim.AdamW(groups(model), lr=1e-4, weight_decay=0.0)
    COMPILE
    for step in range(10):
        batch = {"x": torch.randn(64, 256), "y": torch.zeros(64, dtype=torch.long)}
        batch = {name: tensor.to("cuda") for name, tensor in batch.items()}
        loss = CALL
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
"""
"""Its peak lies after the first step, in which kernels are tried: there, loops differ by a loss."""
WAYS = {
    "module": ("model = torch.compile(model)", "model(**batch)"),
    "method": ("forward = torch.compile(model.forward)", "forward(**batch)"),
    "function": ("loss_of = torch.compile(lambda **batch: model(**batch))", "loss_of(**batch)"),
}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Prediction:
    """Predict the workload that says the same as the script."""
    pytest.importorskip("triton")
    file = tmp_path_factory.mktemp("workload") / "net.py"
    file.write_text(SCRIPT)
    spec: Any = importlib.util.spec_from_file_location("net_of_the_script", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    batch = {"x": torch.randn(64, 256), "y": torch.zeros(64, dtype=torch.long)}
    return trainatomy.predict(
        module.Net(), batch=batch, optimizer=torch.optim.AdamW, max_grad_norm=0, torch_compile=True, gpu="h100"
    )


def compiled(run_script: RunScript, line: str, call: str, text: str = SCRIPT) -> Prediction:
    from trainatomy.simulator.compiled import preload_compiler

    pytest.importorskip("triton")
    preload_compiler()
    found = run_script(text.replace("COMPILE", line).replace("CALL", call), compiles=True)
    assert found.message == ""
    assert found.prediction is not None
    return found.prediction


@pytest.mark.parametrize("way", WAYS)
def test_a_compiled_script_holds_what_its_workload_does(run_script: RunScript, expected: Prediction, way: str) -> None:
    found = compiled(run_script, *WAYS[way])
    if parse_version(torch.__version__) < (2, 15):
        assert found.memory == expected.memory
    else:  # no workspace is kept, so that the peak lies in the first step, where the loops hold other small tensors
        assert found.memory.peak_allocated_bytes == pytest.approx(expected.memory.peak_allocated_bytes, rel=0.005)
        assert found.memory.peak_reserved_bytes == expected.memory.peak_reserved_bytes
    assert "OptimizedModule" not in {one.module for prediction in (found, expected) for one in prediction.modules}
    assert found.script is not None
    assert [(one.name, one.parameters) for one in found.script.models] == [("Net", 8749066)]
    assert not [one for one in found.script.stand_ins if one.kind in ("compiled", "command")]
    assert [note for note in found.notes if "is experimental" in note]


UPDATE = """
    @torch.compile
    def update():
        optimizer.step()
"""


@pytest.mark.parametrize("way", [UPDATE, "update = torch.compile(optimizer.step)"])
def test_a_compiled_step_of_an_optimizer_keeps_no_intermediate_results(run_script: RunScript, way: str) -> None:
    text = SCRIPT.replace("optimizer.step()", "update()")
    found = compiled(run_script, way, "model(**batch)", text)
    eager = compiled(run_script, "update = optimizer.step", "model(**batch)", text)
    assert found.script is not None and not [one for one in found.script.stand_ins if one.kind == "compiled"]
    assert eager.memory.peak.phase == "optimizer" != found.memory.peak.phase
    assert found.memory.components.optimizer_states >= 2 * (256 + 1 + 10) * 32768 * 4
    assert found.time is not None and eager.time is not None
    assert found.time.phases["optimizer"] < eager.time.phases["optimizer"] / 1.5


def test_what_the_compiler_cannot_compile_runs_eagerly_and_is_named(
    run_script: RunScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("trainatomy.simulator.compiled.module.put_on_gpu", fail)
    found = compiled(run_script, "model.compile()", "model(**batch)")
    assert found.script is not None
    assert [one.name for one in found.script.stand_ins if one.kind == "compiled"] == ["Net"]
    assert any("no such kernel" in note for note in found.notes)


def decided(tmp_path: Path, text: str, *arguments: str, compiled: bool | None = None) -> tuple[bool | None, str]:
    file = tmp_path / "train.py"
    file.write_text(text)
    job, reason = compiling(Job(read_command([str(file), *arguments]), ("h100-sxm",), compiles=compiled), file)
    return job.compiles, reason


@pytest.mark.parametrize(
    ("text", "arguments", "wanted"),
    [
        ("model = torch.compile(model)", (), True),
        ("model.compile()", (), True),
        ("", ("--torch_compile",), True),
        ("", ("--dynamo_backend=inductor",), True),
        ("pattern = re.compile('a')", (), False),
        ("import torch", (), False),
    ],
)
def test_the_compiler_is_imported_where_a_script_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, arguments: tuple[str, ...], wanted: bool
) -> None:
    monkeypatch.setattr("trainatomy.simulator.compiled.preload_compiler", lambda asked: None)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert decided(tmp_path, text, *arguments) == (wanted, "")
    assert ("TORCHDYNAMO_DISABLE" in os.environ) is not wanted


def test_without_a_compiler_the_reason_is_told_or_it_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    found, reason = decided(tmp_path, "model.compile()")
    assert found is False and "torch.compile needs triton, which is not installed" in reason
    with pytest.raises(MissingLibrary, match=r"pip install 'trainatomy\[compile\]'"):
        decided(tmp_path, "model.compile()", compiled=True)
    found, reason = decided(tmp_path, "model.compile()", compiled=False)
    assert found is False and "--no-compile" in reason


def test_a_script_says_why_it_was_not_compiled(run_script: RunScript) -> None:
    text = SCRIPT.replace("COMPILE", WAYS["module"][0]).replace("CALL", WAYS["module"][1])
    found = run_script(text, compiles=False, eager="no compiler here").prediction
    assert found is not None and found.script is not None
    assert "no compiler here" in found.notes
    assert [one.name for one in found.script.stand_ins if one.kind == "compiled"] == ["Net"]


def test_on_several_gpus_it_is_compiled_too(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "train.py"
    file.write_text("model.compile()")
    found, reason = compiling(Job(with_gpus(read_command([str(file)]), 2), ("h100-sxm",)), file)
    assert found.compiles is True and not reason


FLEX = """
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

attention = torch.compile(flex_attention)
masks = torch.compile(create_block_mask)
net = torch.nn.Linear(64, 64, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.AdamW(net.parameters())
for step in range(4):
    x = torch.randn(2, 4, 4096, 64, device="cuda", dtype=torch.bfloat16)
    mask = masks(lambda b, h, q, k: q >= k, None, None, 4096, 4096, device="cuda")
    states = net(x)
    attention(states, states, states, block_mask=mask).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.parametrize("with_compiler", [False, True])
def test_flex_attention_needs_no_compiler(run_script: RunScript, with_compiler: bool) -> None:
    if with_compiler:
        from trainatomy.simulator.compiled import preload_compiler

        pytest.importorskip("triton")
        preload_compiler()
    found = run_script(FLEX, compiles=with_compiler, eager="no compiler here").prediction
    assert found is not None and found.script is not None
    assert not [one for one in found.script.stand_ins if one.kind == "compiled"]
    assert any("FlexAttention: its kernels have the efficiency" in note for note in found.notes)
    assert found.memory.peak_allocated_bytes < 2 * 4 * 4096 * 4096 * 2  # one matrix of all scores
