"""Order of the backward pass through operations of an earlier backward pass, against threads of PyTorch's own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from trainatomy.simulator.process import SimulatedProcess

Gradient = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def gradient(output: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(output, data, create_graph=True)[0]


def order_of(gradient: Gradient, device: str) -> list[str]:
    """Return the nodes of three losses with a gradient penalty, in the order in which they run."""
    weight = torch.ones(4, 4, device=device, requires_grad=True)
    seen: list[str] = []
    for _ in range(3):
        data = torch.ones(4, 4, device=device, requires_grad=True)
        score = (torch.ones(4, 4, device=device) @ weight).tanh()
        penalty = gradient((data @ weight).tanh().sum(), data).square()
        loss = score.sum() + penalty.sum()
        note_order(loss.grad_fn, seen)
        loss.backward()
        seen.append("end")
    return seen


def note_order(root: torch.autograd.graph.Node | None, seen: list[str]) -> None:
    """Let each node below add its name when it runs."""
    waiting, known = [root], {root}
    while waiting:
        node = waiting.pop()
        assert node is not None
        if "AccumulateGrad" not in node.name():
            node.register_prehook(functools.partial(lambda name, gradients: seen.append(name), node.name()))
        following = {one for one, _ in node.next_functions if one is not None} - known
        known |= following
        waiting += following


def test_nodes_of_a_backward_pass_have_numbers_of_its_thread(closed: SimulatedProcess) -> None:
    with closed.open():
        simulated = order_of(gradient, "cuda")
    with ThreadPoolExecutor(1) as script, ThreadPoolExecutor(1) as gpu:  # both count from 0
        in_threads = script.submit(order_of, lambda *tensors: gpu.submit(gradient, *tensors).result(), "meta").result()
    assert simulated == in_threads
    assert simulated != order_of(gradient, "meta")
