"""Optimizers given by the path of their class: parameter groups, settings, and the errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn

from trainatomy.api import predict
from trainatomy.errors import FactoryError, MissingLibrary, WorkloadError
from trainatomy.training.optimizer import create_custom, create_single, optimizer_class
from trainatomy.workload import TrainSpec, Workload
from trainatomy.workload.arguments import arguments

if TYPE_CHECKING:
    from pathlib import Path


class Model(nn.Module):
    """Has a weight with decay, a bias, a norm and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.norm = nn.LayerNorm(3)
        self.frozen = nn.Linear(2, 2, bias=False).requires_grad_(False)


def test_groups_and_settings_are_the_trainers() -> None:
    model = Model()
    train = TrainSpec(optim="torch.optim.NAdam", learning_rate=0.1, weight_decay=0.2, adam_beta1=0.3, adam_epsilon=0.4)
    with_decay, without = create_custom(train, model).param_groups
    assert with_decay["params"] == [model.linear.weight]
    assert [id(p) for p in without["params"]] == [id(p) for p in (model.linear.bias, *model.norm.parameters())]
    assert (with_decay["weight_decay"], without["weight_decay"]) == (0.2, 0.0)
    assert (without["lr"], without["betas"], without["eps"]) == (0.1, (0.3, 0.999), 0.4)


def test_optim_args_apply_last_and_accept_tuples() -> None:
    train = TrainSpec(optim="torch.optim.Adafactor", optim_args="eps=(1e-30, 0.002), lr=0.5,foreach=False")
    group = create_custom(train, Model()).param_groups[0]
    assert (group["eps"], group["lr"], group["foreach"]) == ((1e-30, 0.002), 0.5, False)


def test_settings_of_another_form_are_left_to_the_class() -> None:
    assert create_custom(TrainSpec(optim="torch.optim.Adafactor"), Model()).param_groups[0]["eps"] == (None, 0.001)


def test_a_class_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import torch\nclass Slow(torch.optim.SGD):\n    def __init__(self, params, lr): super().__init__(params, lr)\n"
    )
    (tmp_path / "mine_of_test_custom.py").write_text(code)
    (tmp_path / "broken_of_test_custom.py").write_text("1 / 0\n")
    monkeypatch.chdir(tmp_path)
    optimizer = create_custom(TrainSpec(optim="mine_of_test_custom.Slow", learning_rate=0.25), Model())
    assert len(optimizer.param_groups) == 1  # its constructor takes no weight decay
    assert optimizer.param_groups[0]["lr"] == 0.25
    with pytest.raises(FactoryError, match="ZeroDivisionError"):
        optimizer_class("broken_of_test_custom.Slow")


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("lomo_optim.Lomo", MissingLibrary, "pip install lomo_optim"),
        ("no_such_module.Adam", WorkloadError, "no module 'no_such_module'"),
        ("torch.optim.AdamX", WorkloadError, "did you mean"),
        ("torch.nn.Linear", WorkloadError, "derives from torch.optim.Optimizer"),
        ("torch.optim.lr_scheduler", WorkloadError, "not a function"),
    ],
)
def test_unknown_optimizer_classes(path: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        optimizer_class(path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optim": "torch.optim.SGD", "optim_args": "momentun=0.9"}, "has no 'momentun'; did you mean momentum"),
        ({"optim": "torch.optim.SGD", "optim_args": "momentum=-1"}, "torch.optim.SGD refuses: Invalid momentum"),
        ({"optim": "torch.optim.LBFGS"}, None),
    ],
)
def test_arguments_that_the_class_does_not_accept(settings: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert len(create_custom(TrainSpec(**settings), Model()).param_groups) == 1
        return
    with pytest.raises(WorkloadError, match=message):
        create_custom(TrainSpec(**settings), Model())


def test_the_package_of_a_path_is_its_root() -> None:
    package_of = arguments().package_of
    assert [package_of(o) for o in ("bitsandbytes.optim.Adam8bit", "adamw_8bit", "torch.optim.Adam", "sgd")] == [
        "bitsandbytes",
        "bitsandbytes",
        None,
        None,
    ]


@pytest.mark.parametrize("optim", ["torch.optim.", "a..B", "torch.optim.Adam()", ".Adam"])
def test_only_the_form_of_a_path_is_checked_in_a_description(optim: str) -> None:
    def describe(optim: str) -> Workload:
        return Workload.from_mapping({"model": {"id": "gpt2"}, "train": {"optim": optim}})

    assert describe("nowhere.to.be.Found").train.optim == "nowhere.to.be.Found"
    with pytest.raises(WorkloadError, match="unknown optimizer"):
        describe(optim)


@pytest.mark.parametrize("loop", ["trainer", "pytorch"])
def test_states_are_made_where_the_parameters_went(loop: str) -> None:
    """Check that states are on the GPU although the optimizer is built over parameters on the CPU."""
    pytest.importorskip("bitsandbytes")
    from trainatomy.api import predict

    model = {"id": "gpt2", "config": {"n_layer": 1, "n_embd": 64, "n_head": 2, "vocab_size": 512}}
    train = {"optim": "bitsandbytes.optim.Adam8bit", "per_device_train_batch_size": 1}
    found = predict(
        Workload.from_mapping({"model": model, "data": {"sequence_length": 16}, "loop": loop, "train": train})
    )
    large = 512 * 64 + 1024 * 64 + (3 + 1 + 4 + 4) * 64 * 64  # elements of parameters of 4096 and more: two bytes each
    assert found.memory.components.optimizer_states > 2 * large
    assert found.memory.components.optimizer_states < 2.2 * large


def test_classes_are_looked_up_in_torch() -> None:
    assert optimizer_class("torch.optim.RMSprop") is torch.optim.RMSprop


def test_states_that_a_constructor_makes_stay_on_the_cpu() -> None:
    settings = {"model": {"factory": "mine:model"}, "train": {"optim": "torch.optim.Adagrad"}}
    with pytest.raises(WorkloadError, match=r"states when it is made.*loop: pytorch"):
        create_single(Workload.from_mapping(settings), Model())


@pytest.mark.parametrize("optim", ["rmsprop_bnb_8bit", "rmsprop_bnb_32bit"])
def test_a_kernel_that_bitsandbytes_does_not_have(optim: str) -> None:
    pytest.importorskip("bitsandbytes")
    layer = Squared().to(torch.bfloat16)
    batch = {"x": torch.zeros(2, 16, dtype=torch.bfloat16)}
    with pytest.raises(WorkloadError, match="no 32-bit kernel of rmsprop for bfloat16"):
        predict(layer, batch=batch, optimizer=optim)
    assert predict(Squared(), batch={"x": torch.zeros(2, 16)}, optimizer=optim).fits


class Squared(nn.Linear):
    """A small layer that returns its loss."""

    def __init__(self) -> None:
        super().__init__(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()
