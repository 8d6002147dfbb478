"""Models, batches and optimizers of published trainings (``published.yaml``) that no library provides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

VOCABULARY, HIDDEN = 30522, 768
"""Sizes of BERT-base."""


class SummedLogits(nn.Module):
    """A language model whose loss is the sum of its logits, so that no loss function takes time."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return the loss of ``input_ids`` [batch, length]."""
        loss: Tensor = self.model(input_ids).logits.sum()
        return loss


def _bert(dtype: torch.dtype, attention: str) -> nn.Module:
    from transformers import AutoConfig, BertLMHeadModel

    config = AutoConfig.for_model("bert", attn_implementation=attention)
    return SummedLogits(BertLMHeadModel(config)).to(dtype)


def bert_eager() -> nn.Module:
    """Return BERT-base with a language-model head in fp32 and eager attention."""
    return _bert(torch.float32, "eager")


def bert_sdpa() -> nn.Module:
    """The same with ``scaled_dot_product_attention``."""
    return _bert(torch.float32, "sdpa")


def bert_half_eager() -> nn.Module:
    """Return BERT-base with a language-model head in fp16 and eager attention."""
    return _bert(torch.float16, "eager")


def bert_half_sdpa() -> nn.Module:
    """The same with ``scaled_dot_product_attention``."""
    return _bert(torch.float16, "sdpa")


class Encoder(nn.Module):
    """BERT-base's layers in fp16, without embeddings, heads and dropout."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import AutoConfig, BertModel

        quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        self.layers = BertModel(AutoConfig.for_model("bert", attn_implementation="eager", **quiet)).encoder.half()

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Return the sum of the output for ``hidden_states`` [batch, length, 768], as a loss to differentiate."""
        loss: Tensor = self.layers(hidden_states).last_hidden_state.sum()
        return loss


def encoder_half() -> nn.Module:
    """Return the encoder with random weights."""
    return Encoder()


def _ids(length: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda batch_size: {"input_ids": torch.randint(0, VOCABULARY, (batch_size, length))}


def _hidden(length: int) -> Callable[[int], dict[str, Tensor]]:
    return lambda batch_size: {"hidden_states": torch.rand(batch_size, length, HIDDEN, dtype=torch.float16)}


ids_256, ids_512 = _ids(256), _ids(512)
hidden_64, hidden_128, hidden_384, hidden_1024 = map(_hidden, (64, 128, 384, 1024))


def images(batch_size: int) -> dict[str, Tensor]:
    """Images of 224 x 224 pixels that are on the GPU already, and their labels."""
    return {
        "pixel_values": torch.empty(batch_size, 3, 224, 224, device="cuda"),
        "labels": torch.empty(batch_size, dtype=torch.int64, device="cuda"),
    }


class FusedAdam(Optimizer):
    """Fused Adam on fp32 copies of half-precision weights, as apex's ``amp`` at level O2 wraps its own.

    It copies gradients to fp32, steps, and copies the weights back to half precision.
    """

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        super().__init__(params, {"lr": lr})
        self.masters = [p.detach().clone().float() for group in self.param_groups for p in group["params"]]
        for master in self.masters:
            master.grad = torch.zeros_like(master)
        self.inner = torch.optim.AdamW(self.masters, lr=lr, fused=True)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        half = [p for group in self.param_groups for p in group["params"]]
        used = [(p, master) for p, master in zip(half, self.masters, strict=True) if p.grad is not None]
        torch._foreach_copy_([master.grad for _, master in used], [p.grad for p, _ in used])
        self.inner.step()
        torch._foreach_copy_([p for p, _ in used], [master for _, master in used])


class BertAdam(Optimizer):
    """The optimizer of the first ports of BERT to PyTorch.

    It goes parameter by parameter, clips each gradient by its own norm, and is Adam without bias correction and with
    weight decay in the update.
    """

    waits = False
    """True if the CPU reads the norm, as ``clip_grad_norm_`` did before PyTorch 1.5."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the parameters."""
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state, gradient = self.state[parameter], parameter.grad
                if not state:
                    state.update(mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
                self._clip(gradient)
                state["mean"].mul_(0.9).add_(gradient, alpha=0.1)
                state["square"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
                update = state["mean"] / (state["square"].sqrt() + 1e-6)
                if group["weight_decay"] > 0:
                    update += group["weight_decay"] * parameter
                parameter.add_(-(group["lr"] * update))

    def _clip(self, gradient: Tensor) -> None:
        norm = gradient.norm()
        if self.waits:
            if norm.item() > 1:
                gradient.mul_(1 / norm.item())
        else:
            gradient.mul_((1 / (norm + 1e-6)).clamp(max=1.0))


class BertAdamOf2019(BertAdam):
    """The same as run with the PyTorch of 2019."""

    waits = True
