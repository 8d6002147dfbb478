"""The example of docs/trl.md: a loss of sentence-transformers in a plain loop, by a factory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainatomy.simulator.simulate import simulate
from trainatomy.workload import Workload

PAGE = Path(__file__).parents[2] / "docs" / "trl.md"


def test_both_texts_of_a_pair_are_encoded_and_compared(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    found = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert found is not None
    small = "BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)"
    code = found[1].replace("BertConfig()", small).replace("Pooling(768)", "Pooling(32)")
    (tmp_path / "embed.py").write_text(code.replace("(size, 128)", "(size, 16)"))
    workload = Workload.from_mapping(
        {
            "model": {"factory": f"{tmp_path / 'embed.py'}:model"},
            "data": {"factory": f"{tmp_path / 'embed.py'}:batch"},
            "loop": "pytorch",
            "train": {"per_device_train_batch_size": 4},
        }
    )
    trace = simulate(workload, workload.resolve_gpu()).trace
    made = [trace.origins[event.allocation] for event in trace.events if event.action == "alloc"]
    embeddings = [one for one in made if one.step == 1 and one.operation == "aten::embedding" and "word" in one.module]
    assert len(embeddings) == 2
