"""Networks and batches of ``trainings.yaml`` beside transformers: vision, video, audio, recurrent, recommenders."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.append(str(Path(__file__).resolve().parent.parent / "accuracy"))

from torchvision_path import models as torchvision_models

CLASSES = 1000
Batch = dict[str, Tensor]


class Classifier(nn.Module):
    """A network whose scores [batch, classes, ...] are compared with labels [batch, ...]."""

    def __init__(self, network: nn.Module, channels_last: bool = False) -> None:
        super().__init__()
        self.network: Any = network
        self.channels_last = channels_last
        if channels_last:
            self.network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of the batch."""
        if self.channels_last:
            pixel_values = pixel_values.contiguous(memory_format=torch.channels_last)
        found = self.network(pixel_values)
        return F.cross_entropy(found["out"] if isinstance(found, dict) else found, labels)


def _torchvision(
    name: str, folder: str = "", *, channels_last: bool = False, **options: Any
) -> Callable[[], nn.Module]:
    """Return a factory of one of torchvision's networks with random weights."""

    def build() -> nn.Module:
        models = torchvision_models()
        source = getattr(models, folder) if folder else models
        return Classifier(getattr(source, name)(weights=None, **options), channels_last)

    return build


mobilenet_v2 = _torchvision("mobilenet_v2")
mobilenet_v3 = _torchvision("mobilenet_v3_large")
efficientnet_b0 = _torchvision("efficientnet_b0")
efficientnet_b3_last = _torchvision("efficientnet_b3", channels_last=True)
efficientnet_v2 = _torchvision("efficientnet_v2_s")
densenet121 = _torchvision("densenet121")
densenet169 = _torchvision("densenet169")
resnext50 = _torchvision("resnext50_32x4d")
resnext101 = _torchvision("resnext101_32x8d")
shufflenet = _torchvision("shufflenet_v2_x1_0")
mnasnet = _torchvision("mnasnet1_0")
squeezenet = _torchvision("squeezenet1_1")
vgg16 = _torchvision("vgg16_bn")
googlenet = _torchvision("googlenet", aux_logits=False, init_weights=False)
inception = _torchvision("inception_v3", aux_logits=False, init_weights=False)
convnext = _torchvision("convnext_tiny")
wide_resnet_last = _torchvision("wide_resnet50_2", channels_last=True)
resnet101_last = _torchvision("resnet101", channels_last=True)
swin = _torchvision("swin_t")
vit = _torchvision("vit_b_16")
deeplab = _torchvision("deeplabv3_resnet50", "segmentation", weights_backbone=None, num_classes=21)
fcn = _torchvision("fcn_resnet50", "segmentation", weights_backbone=None, num_classes=21)
lraspp = _torchvision("lraspp_mobilenet_v3_large", "segmentation", weights_backbone=None, num_classes=21)
r3d = _torchvision("r3d_18", "video", num_classes=400)
r2plus1d = _torchvision("r2plus1d_18", "video", num_classes=400)
mc3 = _torchvision("mc3_18", "video", num_classes=400)
s3d = _torchvision("s3d", "video", num_classes=400)


def _pictures(side: int, classes: int, dense: bool = False) -> Callable[[int], Batch]:
    """Return a data factory of random images with a label each, or one for each pixel."""

    @cache
    def make(batch_size: int) -> Batch:
        places = (side, side) if dense else ()
        return {
            "pixel_values": torch.rand(batch_size, 3, side, side),
            "labels": torch.randint(0, classes, (batch_size, *places)),
        }

    return make


images = _pictures(224, CLASSES)
large_images = _pictures(299, CLASSES)
scenes = _pictures(256, 21, dense=True)
thumbnails = _pictures(128, 21, dense=True)


@cache
def clips(batch_size: int) -> Batch:
    """Draw random clips of 16 frames."""
    return {"pixel_values": torch.rand(batch_size, 3, 16, 112, 112), "labels": torch.randint(0, 400, (batch_size,))}


@cache
def large_clips(batch_size: int) -> Batch:
    """Draw random clips of 16 frames in the size of photographs."""
    return {"pixel_values": torch.rand(batch_size, 3, 16, 224, 224), "labels": torch.randint(0, 400, (batch_size,))}


class Residual(nn.Module):
    """A block of a diffusion model: group norm, SiLU and convolution, twice."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(32, inside), nn.SiLU(), nn.Conv2d(inside, outside, 3, padding=1))
        self.second = nn.Sequential(nn.GroupNorm(32, outside), nn.SiLU(), nn.Conv2d(outside, outside, 3, padding=1))
        self.beside = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of the block and its input."""
        return self.beside(x) + self.second(self.first(x))


class Denoiser(nn.Module):
    """A U-Net as diffusion models use it, with nearest-neighbour upsampling and attention at the bottom."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        sizes = (width, 2 * width, 3 * width)
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(Residual(a, b) for a, b in zip((width, *sizes), sizes, strict=False))
        self.shrink = nn.ModuleList(nn.Conv2d(size, size, 3, 2, 1) for size in sizes)
        self.middle = Residual(sizes[-1], sizes[-1])
        self.attention = nn.MultiheadAttention(sizes[-1], 6, batch_first=True)
        self.up = nn.ModuleList(
            Residual(a + b, b) for a, b in zip((sizes[-1], *sizes[:0:-1]), sizes[::-1], strict=True)
        )
        self.head = nn.Sequential(nn.GroupNorm(32, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, pixel_values: Tensor, noise: Tensor) -> Tensor:
        """Return the mean squared error of the predicted noise."""
        x, kept = self.stem(pixel_values + noise), []
        for block, shrink in zip(self.down, self.shrink, strict=True):
            kept.append(block(x))
            x = shrink(kept[-1])
        x = self.middle(x)
        rows = x.flatten(2).transpose(1, 2)
        x = x + self.attention(rows, rows, rows, need_weights=False)[0].transpose(1, 2).reshape(x.shape)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0, mode="nearest"), kept.pop()], 1))
        return F.mse_loss(self.head(x), noise)


def denoiser() -> nn.Module:
    """Build the denoiser."""
    return Denoiser()


@cache
def noisy(batch_size: int) -> Batch:
    """Draw random images of 64 x 64 and noise."""
    return {"pixel_values": torch.rand(batch_size, 3, 64, 64), "noise": torch.randn(batch_size, 3, 64, 64)}


class Segmenter(nn.Module):
    """A U-Net with batch norm and bilinear upsampling."""

    def __init__(self, width: int = 48, classes: int = 21) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(4)]
        self.down = nn.ModuleList(_twice(a, b) for a, b in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(_twice(a + b, b) for a, b in zip(sizes[:0:-1], sizes[-2::-1], strict=True))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each pixel."""
        kept: list[Tensor] = []
        for block in self.down:
            x = block(F.max_pool2d(kept[-1], 2) if kept else x)
            kept.append(x)
        for block, beside in zip(self.up, kept[-2::-1], strict=True):
            x = block(torch.cat([beside, F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True)], 1))
        return self.head(x)


def _twice(inside: int, outside: int, space: int = 2) -> nn.Module:
    convolution, norm = ((nn.Conv2d, nn.BatchNorm2d), (nn.Conv3d, nn.BatchNorm3d))[space - 2]
    layers = [convolution(inside, outside, 3, padding=1, bias=False), norm(outside), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, convolution(outside, outside, 3, padding=1, bias=False), norm(outside), nn.ReLU(True))


def segmenter() -> nn.Module:
    """Build the U-Net."""
    return Classifier(Segmenter())


class Volumes(nn.Module):
    """A small 3D U-Net, as for medical images."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.first, self.second = _twice(1, width, 3), _twice(width, 2 * width, 3)
        self.bottom, self.grow = _twice(2 * width, 4 * width, 3), nn.ConvTranspose3d(4 * width, 2 * width, 2, 2)
        self.third, self.last = _twice(4 * width, 2 * width, 3), nn.ConvTranspose3d(2 * width, width, 2, 2)
        self.fourth, self.head = _twice(2 * width, width, 3), nn.Conv3d(width, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores of each place."""
        one = self.first(x)
        two = self.second(F.max_pool3d(one, 2))
        x = self.third(torch.cat([two, self.grow(self.bottom(F.max_pool3d(two, 2)))], 1))
        return self.head(self.fourth(torch.cat([one, self.last(x)], 1)))


def volumes() -> nn.Module:
    """Build the 3D U-Net."""
    return Classifier(Volumes())


@cache
def scans(batch_size: int) -> Batch:
    """Draw random volumes of 64 x 64 x 64 and a class for each place."""
    shape = (batch_size, 64, 64, 64)
    return {"pixel_values": torch.rand(batch_size, 1, 64, 64, 64), "labels": torch.randint(0, 4, shape)}


class Autoencoder(nn.Module):
    """Strided convolutions and transposed ones, with batch norm, as in DCGAN."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        sizes = (3, width, 2 * width, 4 * width, 8 * width)
        pairs = list(pairwise(sizes))
        self.encode = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(a, b, 4, 2, 1), nn.BatchNorm2d(b), nn.LeakyReLU(0.2)) for a, b in pairs)
        )
        self.decode = nn.Sequential(
            *(nn.Sequential(nn.ConvTranspose2d(b, a, 4, 2, 1), nn.BatchNorm2d(a), nn.ReLU()) for a, b in pairs[::-1])
        )

    def forward(self, pixel_values: Tensor, noise: Tensor) -> Tensor:
        """Return the mean squared error of the decoded image."""
        return F.mse_loss(torch.tanh(self.decode(self.encode(pixel_values + noise))), pixel_values)


def autoencoder() -> nn.Module:
    """Build the autoencoder."""
    return Autoencoder()


class Upscaler(nn.Module):
    """Super-resolution by residual blocks and a pixel shuffle, as EDSR."""

    def __init__(self, width: int = 64, depth: int = 12) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(depth)
        )
        self.grow = nn.Sequential(nn.Conv2d(width, 4 * width, 3, padding=1), nn.PixelShuffle(2))

    def forward(self, pixel_values: Tensor, noise: Tensor) -> Tensor:
        """Return the mean absolute difference to the interpolated image."""
        x = self.stem(pixel_values)
        for block in self.blocks:
            x = x + block(x)
        wanted = F.interpolate(pixel_values + noise, scale_factor=2, mode="bicubic")
        return (self.head(self.grow(x)) - wanted).abs().mean()


def upscaler() -> nn.Module:
    """Build the network for super-resolution."""
    return Upscaler()


class Separator(nn.Module):
    """Dilated depthwise convolutions over time, as Conv-TasNet separates speakers."""

    def __init__(self, width: int = 128, inner: int = 512, repeats: int = 2, depth: int = 8) -> None:
        super().__init__()
        self.encode = nn.Conv1d(1, width, 16, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, inner, 1), nn.PReLU(), nn.GroupNorm(1, inner),
                nn.Conv1d(inner, inner, 3, padding=2**level, dilation=2**level, groups=inner),
                nn.PReLU(), nn.GroupNorm(1, inner), nn.Conv1d(inner, width, 1),
            )
            for _ in range(repeats) for level in range(depth)
        )  # fmt: skip
        self.decode = nn.ConvTranspose1d(width, 1, 16, 8)

    def forward(self, input_values: Tensor, labels: Tensor) -> Tensor:
        """Return the mean squared error of the separated sound."""
        mixed = x = self.encode(input_values)
        for block in self.blocks:
            x = x + block(x)
        return F.mse_loss(self.decode(torch.sigmoid(x) * mixed), labels)


def separator() -> nn.Module:
    """Build the separator."""
    return Separator()


@cache
def sounds(batch_size: int) -> Batch:
    """Draw random sounds of two seconds at 8 kHz."""
    return {"input_values": torch.randn(batch_size, 1, 16000), "labels": torch.randn(batch_size, 1, 16000)}


class Waves(nn.Module):
    """Gated dilated convolutions over time, as WaveNet."""

    def __init__(self, width: int = 64, depth: int = 20) -> None:
        super().__init__()
        rates = [2 ** (level % 10) for level in range(depth)]
        self.stem = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(nn.Conv1d(width, 2 * width, 3, padding=rate, dilation=rate) for rate in rates)
        self.mix = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in rates)
        self.head = nn.Conv1d(width, 1, 1)

    def forward(self, input_values: Tensor, labels: Tensor) -> Tensor:
        """Return the mean squared error of the next sample."""
        x = self.stem(input_values)
        for gate, mix in zip(self.gates, self.mix, strict=True):
            up, down = gate(x).chunk(2, 1)
            x = x + mix(torch.tanh(up) * torch.sigmoid(down))
        return F.mse_loss(self.head(x), labels)


def waves() -> nn.Module:
    """Build the network of gated convolutions."""
    return Waves()


class Recogniser(nn.Module):
    """Speech recognition by convolutions, a bidirectional LSTM and the CTC loss, as DeepSpeech 2."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, 32, (11, 41), (2, 2), (5, 20)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
            nn.Conv2d(32, 32, (11, 21), (1, 2), (5, 10)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20),
        )  # fmt: skip
        self.lstm = nn.LSTM(32 * 40, width, 3, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, 29)

    def forward(self, features: Tensor, labels: Tensor) -> Tensor:
        """Return the CTC loss."""
        x = self.convolutions(features).transpose(1, 2).flatten(2)
        scores = self.head(self.lstm(x)[0]).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((scores.shape[1],), scores.shape[0], dtype=torch.long)
        return F.ctc_loss(scores, labels, lengths, torch.full_like(lengths, labels.shape[1]))


def recogniser() -> nn.Module:
    """Build the recogniser."""
    return Recogniser()


@cache
def utterances(batch_size: int) -> Batch:
    """Draw random spectrograms of 400 frames and texts of 40 letters."""
    return {"features": torch.randn(batch_size, 1, 400, 160), "labels": torch.randint(1, 29, (batch_size, 40))}


class Sequences(nn.Module):
    """A recurrent network that predicts the next token."""

    def __init__(self, kind: type[nn.RNNBase], width: int, hidden: int, entries: int = 10000, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(entries, width)
        network: Any = kind
        self.network = network(width, hidden, batch_first=True, **options)
        self.head = nn.Linear(hidden * (2 if options.get("bidirectional") else 1), entries)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy of the batch."""
        return F.cross_entropy(self.head(self.network(self.embedding(tokens))[0]).flatten(0, 1), labels.flatten())


def lstm_language_model() -> nn.Module:
    """Build a language model of two layers of LSTM."""
    return Sequences(nn.LSTM, 650, 650, num_layers=2, dropout=0.5)


def bidirectional_lstm() -> nn.Module:
    """Build a bidirectional LSTM."""
    return Sequences(nn.LSTM, 200, 256, 2000, num_layers=1, bidirectional=True)


def gru_language_model() -> nn.Module:
    """Build a language model of three layers of GRU."""
    return Sequences(nn.GRU, 256, 768, num_layers=3)


def plain_recurrent() -> nn.Module:
    """Build a plain recurrent network."""
    return Sequences(nn.RNN, 128, 512, 2000, num_layers=2)


@cache
def texts(batch_size: int) -> Batch:
    """Draw random texts of 70 tokens."""
    return {name: torch.randint(0, 2000, (batch_size, 70)) for name in ("tokens", "labels")}


@cache
def long_texts(batch_size: int) -> Batch:
    """Draw random texts of 256 tokens."""
    return {name: torch.randint(0, 2000, (batch_size, 256)) for name in ("tokens", "labels")}


def _perceptron(*sizes: int) -> nn.Module:
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class Recommender(nn.Module):
    """Embedding bags for categories, a perceptron for numbers, and products of both, as DLRM."""

    def __init__(self, entries: int = 100_000, width: int = 64, categories: int = 26) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(entries, width, mode="sum") for _ in range(categories))
        self.bottom, count = _perceptron(13, 512, 256, width), categories + 1
        self.top = _perceptron(count * (count - 1) // 2 + width, 512, 256, 1)
        self.register_buffer("pairs", torch.tril_indices(count, count, -1), persistent=False)

    def forward(self, numbers: Tensor, categories: Tensor, labels: Tensor) -> Tensor:
        """Return the mean binary cross-entropy; ``categories`` are [categories, batch, entries of a bag]."""
        dense = self.bottom(numbers)
        rows = [bag(ids) for bag, ids in zip(self.bags, categories.unbind(1), strict=True)]
        every = torch.stack([dense, *rows], 1)
        products = torch.bmm(every, every.transpose(1, 2))
        pairs: Any = self.pairs
        found = self.top(torch.cat([dense, products[:, pairs[0], pairs[1]]], 1))
        return F.binary_cross_entropy_with_logits(found.squeeze(1), labels)


def recommender() -> nn.Module:
    """Build the recommender."""
    return Recommender()


def narrow_recommender() -> nn.Module:
    """Build a recommender of fewer and narrower tables."""
    return Recommender(20_000, 16, 12)


def _clicks(categories: int, entries: int, bag: int) -> Callable[[int], Batch]:
    @cache
    def make(batch_size: int) -> Batch:
        return {
            "numbers": torch.rand(batch_size, 13),
            "categories": torch.randint(0, entries, (batch_size, categories, bag)),
            "labels": torch.rand(batch_size),
        }

    return make


clicks = _clicks(26, 100_000, 4)
narrow_clicks = _clicks(12, 20_000, 1)


class Words(nn.Module):
    """A mean of embeddings and a linear layer, as fastText."""

    def __init__(self, entries: int = 500_000, width: int = 100) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(entries, width, mode="mean"), nn.Linear(width, 20)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return F.cross_entropy(self.head(self.bag(tokens)), labels)


def words() -> nn.Module:
    """Build the classifier of texts."""
    return Words()


@cache
def bags_of_words(batch_size: int) -> Batch:
    """Draw random texts of 50 words."""
    return {"tokens": torch.randint(0, 500_000, (batch_size, 50)), "labels": torch.randint(0, 20, (batch_size,))}


class Towers(nn.Module):
    """Two towers over embeddings of users and items, with all others of the batch as negatives."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(1_000_000, width), nn.Embedding(200_000, width)
        self.left, self.right = _perceptron(width, 512, 256, 64), _perceptron(width, 512, 256, 64)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the mean cross-entropy of finding each user's item."""
        left, right = (F.normalize(tower) for tower in (self.left(self.users(users)), self.right(self.items(items))))
        scores = left @ right.T / 0.05
        return F.cross_entropy(scores, torch.arange(len(users), device=scores.device))


def towers() -> nn.Module:
    """Build the two towers."""
    return Towers()


@cache
def purchases(batch_size: int) -> Batch:
    """Draw random users and items."""
    return {"users": torch.randint(0, 1_000_000, (batch_size,)), "items": torch.randint(0, 200_000, (batch_size,))}


class Many(nn.Module):
    """Many small layers, so that the optimizer has many small tensors."""

    def __init__(self, depth: int = 300, width: int = 96) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(depth))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean squared error."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.mse_loss(x, y)


def many() -> nn.Module:
    """Build the network of many layers."""
    return Many()


@cache
def rows(batch_size: int) -> Batch:
    """Draw random rows of 96 numbers."""
    return {"x": torch.rand(batch_size, 96), "y": torch.rand(batch_size, 96)}
