"""Tensors that are filled with known numbers, whatever is known of the tensor whose shape they have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from trainatomy.catalog.gpus import find_gpu
from trainatomy.simulator.process import SimulatedProcess
from trainatomy.simulator.simulate import simulate
from trainatomy.workload import Workload

SMALL, LARGE = 16, 70_000
"""Tokens of a sample whose values are computed at once, and of one whose values are computed when someone asks."""

TEMPLATES: dict[str, Callable[[int], torch.Tensor]] = {
    "from the batch": lambda n: torch.arange(2 * n).view(2, n).cuda(),
    "drawn on the GPU": lambda n: torch.randint(0, 1000, (2, n), device="cuda"),
    "drawn in place": lambda n: torch.empty(2, n, dtype=torch.long, device="cuda").random_(1000),
    "picked from scores": lambda n: torch.randn(2, n, 9, device="cuda").argmax(-1),
    "unknown": lambda n: torch.randn(2, n, device="cuda").argsort(-1),
    "pixels": lambda n: torch.rand(2, n).cuda(),
}

FILLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "ones_like": torch.ones_like,
    "ones_like of another type": lambda t: torch.ones_like(t, dtype=torch.bool),
    "full_like": lambda t: torch.full_like(t, 3),
    "zeros_like": torch.zeros_like,
    "new_ones": lambda t: t.new_ones(t.shape),
    "new_full": lambda t: t.new_full(t.shape, 2),
    "ones": lambda t: torch.ones(t.shape, device=t.device),
    "ones into": lambda t: torch.ones(t.shape, out=torch.empty(t.shape, device=t.device)),
    "fill_": lambda t: torch.empty_like(t, dtype=torch.long).fill_(1),
    "fill_ of a copy": lambda t: t.long().clone().fill_(1),
    "fill_ with a tensor": lambda t: torch.empty_like(t, dtype=torch.long).fill_(torch.tensor(1).cuda()),
    "zero_": lambda t: t.new_empty(t.shape, dtype=torch.long).zero_(),
    "copy_": lambda t: torch.empty_like(t).copy_(torch.ones_like(t)),
    "copy_ from the host": lambda t: torch.empty_like(t, dtype=torch.long).copy_(torch.ones(t.shape)),
    "type_as": lambda t: torch.ones(t.shape).type_as(t.long()),
    "eye": lambda t: torch.eye(8, device=t.device).sum(0),
    "linspace": lambda t: torch.linspace(1, 1, 8, device=t.device),
    "tril_indices": lambda t: torch.tril_indices(2, 2, device=t.device)[:, :1],
}

FOLLOWING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "slice": lambda m: m[:, 2:],
    "expand": lambda m: m[:, None].expand(-1, 3, -1),
    "cat": lambda m: torch.cat([m, m.new_ones(m.shape)], 1),
    "stack": lambda m: torch.stack([m, torch.ones_like(m)]),
    "pad": lambda m: torch.nn.functional.pad(m, (0, 3), value=1),
    "masked_fill": lambda m: m.masked_fill(m == 0, 5),
    "where": lambda m: torch.where(m.bool(), m, torch.zeros_like(m)),
    "cumsum": lambda m: m.cumsum(1).clamp(max=1),
    "tril": lambda m: torch.tril(m[:, :2])[:, :1],
    "to": lambda m: m.to(torch.float16),
    "bool": lambda m: m.bool() & ~torch.zeros_like(m).bool(),
    "gather": lambda m: m.gather(1, torch.zeros_like(m)),
    "index": lambda m: m[:, torch.arange(4, device=m.device)],
    "on the host": lambda m: m.cpu(),
}


def uniform(tensor: torch.Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())


@pytest.mark.parametrize(
    ("template", "tokens"),
    [(name, tokens) for name in TEMPLATES for tokens in (SMALL, LARGE) if (name, tokens) != ("pixels", LARGE)],
)  # large fractions of the shape of others are gradients and states, about which nobody asks
def test_what_is_filled_is_known_whatever_is_known_of_its_template(
    process: SimulatedProcess, template: str, tokens: int
) -> None:
    make, values = TEMPLATES[template], process.recorder.values
    filled = {name: fill(make(tokens)) for name, fill in FILLED.items()}
    assert [name for name, tensor in filled.items() if values.of(tensor) is None] == []
    assert [name for name, tensor in filled.items() if not uniform(tensor)] == []
    followed = {name: follow(torch.ones_like(make(tokens), dtype=torch.long)) for name, follow in FOLLOWING.items()}
    assert [name for name, tensor in followed.items() if not uniform(tensor)] == []
    assert not values.deciding, "nothing follows from numbers that were drawn or picked"


def test_whole_numbers_that_the_gpu_draws_are_those_that_are_drawn_here(process: SimulatedProcess) -> None:
    ids, values = torch.randint(5, 1000, (2, 400), device="cuda"), process.recorder.values
    assert bool((ids != 0).all()) and not bool((ids == 3).any())
    words = ids.cpu()
    assert words.min() >= 5 and len(words.unique()) > 300 and ids.tolist() == words.tolist()
    assert bool((ids == words[0, 0].item()).any()) and int(ids[0, 0]) == int(words[0, 0])
    assert values.deciding == {"draw"}
    fractions = torch.rand(400, device="cuda")
    assert values.of(fractions) is None and values.of(fractions, with_data=True) is not None
    with pytest.raises(IndexError, match="device-side assert"):
        torch.nn.functional.embedding(ids, torch.randn(100, 8, device="cuda"))


def test_what_overwrites_drawn_numbers_is_what_is_read(process: SimulatedProcess) -> None:
    ids = torch.randint(5, 1000, (2, 8), device="cuda")
    view = ids[:, :4]
    ids.fill_(1)
    assert uniform(ids)
    assert process.recorder.values.of(view) is None, "an earlier view of them is not what was drawn any more"
    ids.random_(7, 8)
    assert uniform(ids) and ids[0, 0].item() == 7
    ids.copy_(torch.empty(2, 8, device="cuda").argsort())
    assert process.recorder.values.of(ids) is None


MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        config = LlamaConfig(
            hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=100
        )
        self.body = LlamaForCausalLM(config)

    def forward(self, x):
        ids = torch.randint(0, 100, (1, 1024), device=x.device)
        return self.body(ids, attention_mask=MASK, labels=ids).loss

def model():
    return Net()

def batch(size):
    return {"x": torch.zeros(size)}
"""


@pytest.mark.parametrize(
    ("mask", "is_built"),
    [("torch.ones_like(ids)", False), ("ids.new_ones(ids.shape)", False), ("ids >= 0", False), ("ids % 2", True)],
)
def test_a_causal_mask_is_built_only_where_something_is_masked(
    from_factory: Callable[..., Workload], mask: str, is_built: bool
) -> None:
    found = simulate(from_factory(MODEL.replace("MASK", mask)), find_gpu("h200"))
    assert (1024 * 1024 in {event.bytes for event in found.trace.events}) is is_built
