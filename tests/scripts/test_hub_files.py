"""Files of a hub that a script reads by itself, where they are not on this machine."""

from __future__ import annotations

from pathlib import Path

import pytest
from script_types import RunScript

SCRIPT = """
import json
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import hf_hub_download, snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

NAME = "meta-llama/Llama-3.2-1B"
path = Path(hf_hub_download(NAME, "config.json"))
folder = Path(snapshot_download(NAME, allow_patterns=["*.safetensors"]))
assert path.parent == folder and len(folder.name) == 40  # a commit
assert len(AutoTokenizer.from_pretrained(folder)) == 128256  # as by name: the folder has none
read = json.loads(path.read_text())
assert read["architectures"] == ["LlamaForCausalLM"]
try:
    hf_hub_download(NAME, "tokenizer.json")
except OSError:
    pass
else:
    raise AssertionError("there is no such file")
config = AutoConfig.for_model(**{**read, "num_hidden_layers": 1})
model = AutoModelForCausalLM.from_config(config).cuda()
dcp.load(model.state_dict(), storage_reader=dcp.HuggingFaceStorageReader(str(folder)))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
ids = torch.ones(1, 8, dtype=torch.long, device="cuda")
for _ in range(3):
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_framework_reads_a_configuration_and_weights_by_itself(run_script: RunScript) -> None:
    found = run_script(SCRIPT)
    assert found.message == ""
    assert found.prediction is not None and found.prediction.script is not None
    used = {(one.kind, one.name.rpartition("/")[2]) for one in found.prediction.script.stand_ins}
    assert used >= {("configuration", "Llama-3.2-1B"), ("pretrained weights", "0" * 40)}


MODELSCOPE = """
from modelscope import snapshot_download
from transformers import AutoTokenizer

folder = snapshot_download("Qwen/Qwen2.5-0.5B-Instruct", "master")
assert AutoTokenizer.from_pretrained(folder).apply_chat_template([{"role": "user", "content": "a"}])
try:
    snapshot_download("nobody/has-this-one")
except LookupError:
    print("reached the end")
"""


def test_modelscope_gives_the_folder_of_a_model_that_ships(
    run_script: RunScript, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    module = tmp_path / "modelscope" / "hub" / "snapshot_download.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "def snapshot_download(model_id=None, revision=None, local_files_only=False):\n"
        "    assert local_files_only  # else it tries to reach its hub for half a minute\n"
        "    raise LookupError(model_id)\n"
    )
    for package in (module.parent, module.parent.parent):
        (package / "__init__.py").write_text("")
    (tmp_path / "modelscope" / "__init__.py").write_text("from .hub.snapshot_download import snapshot_download\n")
    monkeypatch.syspath_prepend(tmp_path)
    run_script(MODELSCOPE)
    assert "reached the end" in capfd.readouterr().out


def test_an_error_that_was_raised_because_the_network_is_off_says_so(run_script: RunScript) -> None:
    found = run_script("""
        from huggingface_hub import hf_hub_download
        hf_hub_download("nobody/has-this-one", "config_setfit.json")
    """)
    assert "needs the network" in found.message and "--network" in found.message
