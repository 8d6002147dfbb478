"""Errors of library code while a step is executed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainatomy.catalog.versions import parse_version
from trainatomy.errors import SimulationError, TrainatomyError, WorkloadError
from trainatomy.simulator.simulate import simulate
from trainatomy.training.model import build_model
from trainatomy.workload import Workload

_TINY = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 200,
}


def _bert(**sections: Any) -> Workload:
    model = {"class": "BertForMaskedLM", "config": {**_TINY, **sections.pop("config", {})}}
    return Workload.from_mapping({"loop": "pytorch", "model": model, **sections})


def test_a_batch_of_a_wrong_shape_is_reported_with_operation_module_and_line(tmp_path: Path) -> None:
    made = tmp_path / "batch.py"
    made.write_text(
        "import torch\n\ndef make(size):\n"
        "    ids = torch.ones(size, 16, dtype=torch.long)\n"
        "    return {'input_ids': ids, 'labels': ids, 'position_ids': torch.arange(7)[None]}\n"
    )
    workload = _bert(data={"factory": f"{made}:make"})
    with pytest.raises(SimulationError) as error:
        simulate(workload, workload.resolve_gpu())
    first, where, advice = str(error.value).splitlines()
    assert first.startswith("BertForMaskedLM cannot be executed: aten::expand in bert.embeddings raised ")
    assert "modeling_bert.py:" in where
    assert "data.factory" in advice


def _advice(workload: Workload) -> str:
    with pytest.raises(SimulationError) as error:
        simulate(workload, workload.resolve_gpu())
    return str(error.value).splitlines()[-1]


def test_the_advice_fits_the_error(tmp_path: Path) -> None:
    made = tmp_path / "batch.py"
    made.write_text(
        "import torch\n\ndef make(size):\n"
        "    ids = torch.ones(size, 16, dtype=torch.long)\n"
        "    return {'labels': ids}\n"
    )
    assert _advice(_bert(data={"factory": f"{made}:make"})).startswith("Check that data.factory returns")
    advice = _advice(_bert(train={"optim": "torch.optim.LBFGS", "optim_args": "line_search_fn=strong_wolfe"}))
    assert "optimizer" in advice and "data.factory" not in advice


def test_an_optimizer_with_a_closure_is_refused_before_the_step() -> None:
    workload = _bert(train={"optim": "torch.optim.LBFGS", "optim_args": "line_search_fn=strong_wolfe"})
    with pytest.raises(SimulationError, match=r"train\.optim: torch\.optim\.LBFGS needs a closure"):
        simulate(workload, workload.resolve_gpu())


def test_an_error_carries_its_operation_and_module(tmp_path: Path) -> None:
    made = tmp_path / "batch.py"
    made.write_text(
        "import torch\n\ndef make(size):\n"
        "    ids = torch.ones(size, 16, dtype=torch.long)\n"
        "    return {'input_ids': ids, 'labels': ids, 'position_ids': torch.arange(7)[None]}\n"
    )
    with pytest.raises(SimulationError) as error:
        simulate(workload := _bert(data={"factory": f"{made}:make"}), workload.resolve_gpu())
    assert (error.value.operation, error.value.module) == ("aten::expand", "bert.embeddings")


def test_a_configuration_that_no_layer_takes_is_refused() -> None:
    with pytest.raises(WorkloadError, match="BertForMaskedLM"):
        build_model(_bert(config={"hidden_act": "no such activation"}))


def test_offloading_of_checkpointed_layers_is_refused_by_name() -> None:
    train = {"fsdp": True, "fsdp_config": {"activation_checkpointing_offload": True}}
    with pytest.raises(WorkloadError, match="activation_checkpointing_offload: is not passed on to accelerate"):
        Workload.from_mapping({"model": {"id": "gpt2"}, "train": train, "parallel": {"gpus": 2}})


_OF_SPARSE_GRADIENTS = (
    r"none on a GPU either(.|\n)*max_grad_norm: 0"
    if parse_version(torch.__version__) < (2, 14)
    else "kernel for sparse tensors"  # clipping takes the norm of each tensor, of which there is a sparse kernel
)


@pytest.mark.parametrize(
    ("layer", "forward", "message"),
    [
        ("torch.jit.script(nn.Linear(8, 8))", "self.layer(x)", "torch.jit.script or torch.jit.trace compiled"),
        ("nn.LazyLinear(8)", "self.layer(x)", "parameters without a shape"),
        ("nn.Linear(8, 8)", "self.layer(torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged)).values()",
         "Nested tensors"),
        ("nn.Embedding(9, 8, sparse=True)", "self.layer(x.long())", _OF_SPARSE_GRADIENTS),
    ],
)  # fmt: skip
def test_modules_that_cannot_be_simulated_are_named(
    from_factory: Callable[..., Workload], layer: str, forward: str, message: str
) -> None:
    workload = from_factory(
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        f"        self.layer = {layer}\n"
        "    def forward(self, x):\n"
        f"        return {forward}.sum()\n"
        "def model():\n"
        "    return Net()\n"
        "def batch(size):\n"
        "    return {'x': torch.zeros(size, 8)}\n",
        loop="pytorch",
    )
    with pytest.raises(TrainatomyError, match=message):
        simulate(workload, workload.resolve_gpu())
