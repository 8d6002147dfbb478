"""Files of a hub that a script reads by itself, where they are not on this machine."""

from __future__ import annotations

from script_types import RunScript

SCRIPT = """
import json
from pathlib import Path
import torch
import torch.distributed.checkpoint as dcp
from huggingface_hub import hf_hub_download, snapshot_download
from transformers import AutoConfig, AutoModelForCausalLM

NAME = "meta-llama/Llama-3.2-1B"
path = Path(hf_hub_download(NAME, "config.json"))
folder = Path(snapshot_download(NAME, allow_patterns=["*.safetensors"]))
assert path.parent == folder and len(folder.name) == 40  # a commit
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
