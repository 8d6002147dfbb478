"""What an agent is told, and the server that tells it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from trainatomy.agents.answers import Found, Oracle, Predicted, Question
from trainatomy.errors import WorkloadError

SMALL = {"class": "LlamaForCausalLM", "config": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                                                 "num_attention_heads": 4, "vocab_size": 1000}}  # fmt: skip
WORKLOAD = json.dumps({"model": SMALL, "data": {"sequence_length": 64}})
LARGE = """\
model_name_or_path: openai-community/gpt2-xl
finetuning_type: full
do_train: true
cutoff_len: 256
per_device_train_batch_size: 4
bf16: true
"""


def test_a_prediction_in_short() -> None:
    found = Oracle().answer(Question("predict", WORKLOAD, {"gpu": "t4", "per_device_train_batch_size": 2}))
    assert isinstance(found, Predicted) and found.fits and found.verdict.startswith("fits on T4")
    assert 0 < found.needs_gib < found.gpu_gib and found.step_seconds and found.samples_per_second
    assert "2 × 64 tokens" in found.training and found.memory_gib["context"] > 0
    priced = Oracle().answer(Question("predict", WORKLOAD, {"instance": "g4dn.xlarge"}))
    assert isinstance(priced, Predicted) and priced.usd_per_million_samples


def test_what_helps_is_said_in_the_keys_that_were_given() -> None:
    found = Oracle().answer(Question("why_out_of_memory", LARGE, {"gpu": "rtx-3060"}))
    assert isinstance(found, Found) and found.best is None and "does not fit" in found.answer
    first = found.remedies[0]
    assert first.fits and first.keys and not first.keys.keys() & {"train.per_device_train_batch_size"}
    assert all(not each.fits for each in found.remedies[sum(each.fits for each in found.remedies) :])


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(WorkloadError, match="the training:7: lora_rnk: is no key of LLaMA-Factory"):
        Oracle().answer(Question("predict", f"{LARGE}lora_rnk: 8\n", {"gpu": "t4"}))


def test_the_server_answers_by_the_protocol(tmp_path: Path) -> None:
    pytest.importorskip("mcp.server.mcpserver")
    import anyio
    from mcp.client.session import ClientSession
    from mcp.client.stdio import StdioServerParameters, stdio_client

    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nmodel = torch.nn.Linear(64, 64).cuda()\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for _ in range(3):\n    model(torch.ones(8, 64, device='cuda')).sum().backward()\n    optimizer.step()\n",
        encoding="utf-8",
    )

    async def asked() -> list[Any]:
        server = StdioServerParameters(command=sys.executable, args=["-m", "trainatomy", "mcp"])
        async with stdio_client(server) as streams, ClientSession(*streams) as session:
            await session.initialize()
            names = [tool.name for tool in (await session.list_tools()).tools]
            fits = await session.call_tool("predict", {"training": WORKLOAD, "gpu": "t4"})
            wrong = await session.call_tool("predict", {"training": WORKLOAD, "gpu": "t40"})
            run = await session.call_tool("run", {"command": f"python {script}", "gpu": "t4"})
            return [names, fits, wrong, run]

    names, fits, wrong, run = anyio.run(asked)
    assert names == ["predict", "fit", "why_out_of_memory", "run"]
    assert fits.structured_content["fits"] and fits.structured_content["needs_gib"] > 0
    assert wrong.is_error and "unknown GPU 't40'" in wrong.content[0].text
    assert run.structured_content["fits"] and "Linear" in run.structured_content["training"]
