"""Networks and batches of published steps (``published_steps.yaml``), as their sources build and call them.

A name says what to build: ``timm__NAME`` (under autocast, with its own labels), ``labelled__NAME`` (of timm, too) and
``torchvision__NAME`` are networks, ``pixels_SIZE`` images on the GPU, ``loaded_SIZE`` images on the host,
``ids_LENGTH`` token ids.  Words between say more, as in ``timm_last_old__NAME``:
``last``: channels last; ``old``: attention of single operations; ``half``: 16 bits; ``labelled``: with labels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parent.parent / "accuracy"))

from torchvision_path import models as torchvision_models

CLASSES = 1000


def _timm() -> Any:
    """Return timm, installed or in ``build/timm``; it imports torchvision, whose operators are declared first."""
    torchvision_models()
    sys.path.append(str(Path(__file__).resolve().parents[2] / "build" / "timm"))
    import timm

    return timm


def _channels_last(network: Any) -> Any:
    return network.to(memory_format=torch.channels_last)


class Amp(nn.Module):
    """A classifier as timm's ``benchmark.py --amp`` calls it: in fp16 by autocast, without gradient scaling."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the scores [batch, classes], or in training the loss with labels that are drawn on the GPU."""
        with torch.autocast("cuda", torch.float16):
            scores = self.network(pixel_values)
            if not self.training:
                return scores
            scores = scores[0] if isinstance(scores, tuple) else scores
            labels = torch.empty(len(scores), device=scores.device, dtype=torch.int64).random_(CLASSES)
            return F.cross_entropy(scores, labels)


class Labelled(nn.Module):
    """A classifier that compares its scores with labels."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        scores = self.network(pixel_values)
        return F.cross_entropy(scores, labels)


class LanguageModel(nn.Module):
    """A model of transformers, called with token ids alone: its logits, or in training the loss of repeating them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits or loss of ``input_ids`` [batch, length]."""
        found = self.model(input_ids)
        logits = found["prediction_logits"] if "prediction_logits" in found else found["logits"]
        if not self.training:
            return logits
        return F.cross_entropy(logits.view(-1, logits.size(-1)), input_ids.view(-1))


def _eager(kind: str, architecture: str, **sizes: Any) -> Callable[[], nn.Module]:
    """Return a factory of a model of transformers with eager attention."""

    def build() -> nn.Module:
        import transformers

        config = transformers.AutoConfig.for_model(kind, **sizes)
        config._attn_implementation = "eager"
        config.use_cache = False
        return LanguageModel(getattr(transformers, architecture)(config))

    return build


_BERT_LARGE: dict[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
}  # fmt: skip
bert_large_trained = _eager("bert", "BertForPreTraining", **_BERT_LARGE)
bert_large_called = _eager("bert", "BertForSequenceClassification", **_BERT_LARGE)
gpt2_large = _eager("gpt2", "GPT2LMHeadModel", n_embd=1280, n_head=20, n_layer=36)
gpt3_xl = _eager("gpt2", "GPT2LMHeadModel", n_embd=3072, n_head=24, n_layer=24, n_positions=2048)
gpt3_27 = _eager("gpt2", "GPT2LMHeadModel", n_embd=2560, n_head=32, n_layer=32, n_positions=2048)
opt_13 = _eager(
    "opt", "OPTForCausalLM",
    hidden_size=2048, ffn_dim=8192, num_attention_heads=32, num_hidden_layers=24, word_embed_proj_dim=2048,
)  # fmt: skip


class MaskedPositions(nn.Module):
    """BERT-large in pre-training, whose head sees the masked positions alone, as NVIDIA's code gathers them."""

    def __init__(self, masked: int) -> None:
        super().__init__()
        from transformers import AutoConfig, BertForPreTraining

        self.model = BertForPreTraining(AutoConfig.for_model("bert", attn_implementation="eager", **_BERT_LARGE))
        self.masked = masked

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        """Return the sum of both losses; ``labels`` are those of the second sentence [batch]."""
        states, pooled = self.model.bert(input_ids, attention_mask, token_type_ids, return_dict=False)
        rows = torch.zeros(len(input_ids) * self.masked, dtype=torch.int64, device=states.device)
        scores, next_sentence = self.model.cls(states.flatten(0, 1).index_select(0, rows), pooled)
        return F.cross_entropy(scores, rows) + F.cross_entropy(next_sentence, labels)


def masked_20() -> nn.Module:
    """Return BERT-large of the first phase: 20 masked positions of 128."""
    return MaskedPositions(20)


def _sentences(length: int) -> Callable[[int], dict[str, Tensor]]:
    def batch(batch_size: int) -> dict[str, Tensor]:
        ids = torch.ones(batch_size, length, dtype=torch.int64)
        return {"input_ids": ids, "token_type_ids": ids, "attention_mask": ids, "labels": ids[:, 0]}

    return batch


sentences_128 = _sentences(128)


def _network(kind: str, name: str) -> nn.Module:
    first, *options = kind.split("_")
    if first == "torchvision":
        network = getattr(torchvision_models(), name)(weights=None)
        return Labelled(network.half() if "half" in options else network)
    timm = _timm()
    timm.layers.set_fused_attn("old" not in options)
    network = (Labelled if first == "labelled" else Amp)(timm.create_model(name, pretrained=False))
    return _channels_last(network) if "last" in options else network


def _batch(kind: str, size: int, batch_size: int) -> dict[str, Tensor]:
    shape, options = (batch_size, 3, size, size), kind.split("_")
    if options[0] == "ids":
        return {"input_ids": torch.ones(batch_size, size, dtype=torch.int64, device="cuda")}
    dtype = torch.float16 if "half" in options else torch.float32
    device = "cpu" if options[0] == "loaded" else "cuda"
    pixels = torch.empty(shape, dtype=dtype, device=device)
    if "last" in options:
        pixels = pixels.contiguous(memory_format=torch.channels_last)
    labels = torch.empty(batch_size, dtype=torch.int64, device="cuda")
    return {"pixel_values": pixels, "labels": labels} if "labelled" in options else {"pixel_values": pixels}


def __getattr__(name: str) -> Callable[..., Any]:
    """Return the factory of a name's network or batch."""
    kind, _, rest = name.partition("__")
    if rest and kind.split("_")[0] in ("timm", "labelled", "torchvision"):
        return lambda: _network(kind, rest)
    kind, _, size = name.rpartition("_")
    if kind.split("_")[0] in ("pixels", "loaded", "ids") and size.isdigit():
        return lambda batch_size: _batch(kind, int(size), batch_size)
    raise AttributeError(name)
