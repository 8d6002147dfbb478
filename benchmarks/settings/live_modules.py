"""Modules as users write them, with operations that models of transformers seldom have, each with its batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def vectors(batch_size: int) -> dict[str, Tensor]:
    """Return vectors of 300 numbers for each sample, and a class of 37."""
    x = torch.randn(batch_size, 300, generator=_generator())
    return {"x": x, "y": torch.randint(0, 37, (batch_size,), generator=_generator())}


def sequences(batch_size: int) -> dict[str, Tensor]:
    """Return sequences of 150 vectors of 96 numbers for each sample, and a class of 37."""
    x = torch.randn(batch_size, 150, 96, generator=_generator())
    return {"x": x, "y": torch.randint(0, 37, (batch_size,), generator=_generator())}


def images(batch_size: int) -> dict[str, Tensor]:
    """Return images of 96 x 80 pixels, and a class of 37."""
    x = torch.rand(batch_size, 3, 96, 80, generator=_generator())
    return {"x": x, "y": torch.randint(0, 37, (batch_size,), generator=_generator())}


class Scaled(torch.autograd.Function):
    """A function with a backward pass of its own, which saves its input and a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        """Return a scaled softplus."""
        ctx.save_for_backward(x, factor)
        return functional.softplus(x) * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of both."""
        x, factor = ctx.saved_tensors
        return gradient * torch.sigmoid(x) * factor, (gradient * functional.softplus(x)).sum(0)


class OwnFunction(nn.Module):
    """Layers with an autograd function that a user wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(300, 2048), nn.Linear(2048, 2048), nn.Linear(2048, 37)])
        self.factors = nn.ParameterList([nn.Parameter(torch.ones(2048)) for _ in range(2)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        for layer, factor in zip(self.layers[:2], self.factors, strict=True):
            x = Scaled.apply(layer(x), factor)
        return functional.cross_entropy(self.layers[2](x), y)


class Penalised(nn.Module):
    """A critic with a gradient penalty: a gradient of a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(300, 1024), nn.LeakyReLU(0.2), nn.LayerNorm(1024), nn.Linear(1024, 1024), nn.Tanh()
        )
        self.head = nn.Linear(1024, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the critic's loss with the penalty."""
        x = x.requires_grad_()
        score = self.head(self.body(x)).squeeze(-1)
        (gradient,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return functional.softplus(-score * (y % 2).float()).mean() + (gradient.norm(2, dim=1) - 1).square().mean()


class Normalised(nn.Module):
    """Weight and spectral norm by parametrisation, in a network over time."""

    def __init__(self) -> None:
        super().__init__()
        norms = nn.utils.parametrizations
        self.first = norms.weight_norm(nn.Conv1d(96, 256, 5, padding=4, dilation=2))
        self.second = norms.spectral_norm(nn.Linear(256, 512))
        self.third = norms.orthogonal(nn.Linear(512, 64))
        self.head = nn.Linear(64, 37)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        x = functional.gelu(self.first(x.transpose(1, 2))).transpose(1, 2)
        x = self.third(functional.glu(torch.cat([self.second(x)] * 2, -1))).amax(1)
        return functional.cross_entropy(self.head(x), y)


class Spectral(nn.Module):
    """A Fourier layer over images, with complex weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv2d(3, 32, 1)
        self.weight = nn.Parameter(torch.randn(32, 32, 12, 12, dtype=torch.cfloat) / 32)
        self.pointwise = nn.Conv2d(32, 32, 1)
        self.head = nn.Linear(32, 37)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        x = self.lift(x)
        modes = torch.fft.rfft2(x)
        kept = torch.einsum("bixy,ioxy->boxy", modes[:, :, :12, :12], self.weight)
        filled = torch.zeros_like(modes)
        filled[:, :, :12, :12] = kept
        x = functional.gelu(torch.fft.irfft2(filled, s=x.shape[-2:]) + self.pointwise(x))
        return functional.cross_entropy(self.head(x.mean((2, 3))), y)


class Quantiser(nn.Module):
    """A vector quantiser with a straight-through gradient, and a codebook by distance."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(96, 64), nn.Linear(64, 96)
        self.codebook = nn.Embedding(512, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of the reconstruction, with the commitment."""
        z = self.encode(x)
        flat = z.reshape(-1, 64)
        nearest = torch.cdist(flat, self.codebook.weight).argmin(1)
        code = self.codebook(nearest).view_as(z)
        through = z + (code - z).detach()
        usage = functional.one_hot(nearest, 512).float().mean(0)
        entropy = -(usage * (usage + 1e-10).log()).sum()
        commitment = functional.mse_loss(z, code.detach()) + functional.mse_loss(code, z.detach())
        return functional.mse_loss(self.decode(through), x) + commitment - 0 * entropy * y.float().mean()


class Graph(nn.Module):
    """Message passing by index, with sums, a sort and a top-k, on edges that the module makes."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(192, 256)
        self.update = nn.GRUCell(256, 96)
        self.head = nn.Linear(96, 37)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        samples, nodes, width = x.shape
        source = torch.arange(nodes, device=x.device).repeat_interleave(4)
        target = (source * 7 + torch.arange(4, device=x.device).repeat(nodes)) % nodes
        for _ in range(2):
            sent = functional.relu(self.message(torch.cat([x[:, source], x[:, target]], -1)))
            received = x.new_zeros(samples, nodes, 256).index_add(1, target, sent)
            x = self.update(received.reshape(-1, 256), x.reshape(-1, width)).view(samples, nodes, width)
        weight = x.norm(dim=-1)
        best = weight.topk(20, dim=1).indices
        pooled = torch.gather(x, 1, best[..., None].expand(-1, -1, width)).logsumexp(1)
        return functional.cross_entropy(self.head(pooled.sort(-1).values), y)


class Warped(nn.Module):
    """A spatial transformer: an affine grid, sampling, and an upsampled reconstruction."""

    def __init__(self) -> None:
        super().__init__()
        self.locate = nn.Sequential(nn.Flatten(), nn.Linear(3 * 96 * 80, 64), nn.ReLU(), nn.Linear(64, 6))
        self.body = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.SiLU(), nn.AvgPool2d(4))
        self.back = nn.Sequential(nn.Upsample(scale_factor=4, mode="bicubic"), nn.Conv2d(24, 3, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of the reconstruction."""
        grid = functional.affine_grid(self.locate(x).view(-1, 2, 3), list(x.shape), align_corners=False)
        warped = functional.grid_sample(x, grid, align_corners=False, padding_mode="border")
        return functional.smooth_l1_loss(self.back(self.body(warped)), x) + 0 * y.float().mean()


class Flow(nn.Module):
    """Coupling layers with an invertible mixing: a log-determinant in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.mixing = nn.ParameterList([nn.Parameter(torch.linalg.qr(torch.randn(300, 300))[0]) for _ in range(3)])
        self.nets = nn.ModuleList(
            [nn.Sequential(nn.Linear(150, 512), nn.Mish(), nn.Linear(512, 300)) for _ in range(3)]
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the negative log-likelihood."""
        total = x.new_zeros(x.shape[0])
        for weight, net in zip(self.mixing, self.nets, strict=True):
            x = x @ weight
            kept, changed = x.chunk(2, 1)
            scale, shift = net(kept).chunk(2, 1)
            x = torch.cat([kept, changed * torch.exp(torch.tanh(scale)) + shift], 1)
            total = total + torch.tanh(scale).sum(1) + torch.linalg.slogdet(weight)[1]
        return (0.5 * x.square().sum(1) - total).mean() + 0 * y.float().mean()


class Clipped(nn.Module):
    """Two towers with a contrastive loss over the batch, and half of the layers recomputed by hand."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(96, 6, 384, dropout=0.1, batch_first=True, norm_first=True)
        self.left = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.right = nn.Sequential(nn.Linear(96, 384), nn.Hardswish(), nn.Linear(384, 96))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the contrastive loss of both directions."""
        z = x
        for number, layer in enumerate(self.left.layers):
            z = checkpoint(layer, z, use_reentrant=False) if number % 2 else layer(z)
        a = functional.normalize(z.mean(1), dim=-1)
        b = functional.normalize(self.right(x).mean(1), dim=-1)
        logits = a @ b.T * self.temperature.exp()
        own = torch.arange(len(x), device=x.device)
        loss = functional.cross_entropy(logits, own) + functional.cross_entropy(logits.T, own)
        return loss / 2 + 0 * y.float().mean()


class Recurrent(nn.Module):
    """A packed LSTM with projections, attention with its weights, and a triplet of losses."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(96, 256, 2, batch_first=True, dropout=0.2, proj_size=64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True, dropout=0.1)
        self.head = nn.Linear(64, 37)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        states, _ = self.recurrent(x)
        attended, weights = self.attention(states, states, states, need_weights=True)
        logits = self.head(attended[:, -1])
        sparsity = torch.special.entr(weights.clamp_min(1e-9)).mean()
        return functional.multi_margin_loss(logits, y) + 0.01 * sparsity + 0.01 * attended.var(1).mean()


class Aligned(nn.Module):
    """A recogniser of sequences with CTC, cumulative sums and an interpolation over time."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(96, 192, 7, stride=2, padding=3, groups=3), nn.BatchNorm1d(192), nn.PReLU())
        self.head = nn.Linear(192, 38)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the CTC loss."""
        z = self.body(x.transpose(1, 2))
        z = functional.interpolate(z, size=120, mode="linear") + z.cumsum(-1)[..., -1:] / z.shape[-1]
        scores = self.head(z.permute(2, 0, 1)).log_softmax(-1)
        targets = (y[:, None] + torch.arange(12, device=y.device)) % 37 + 1
        lengths = torch.full((len(y),), 120, dtype=torch.long, device=y.device)
        sizes = torch.full((len(y),), 12, dtype=torch.long, device=y.device)
        return functional.ctc_loss(scores, targets, lengths, sizes, zero_infinity=True)


class Volumes(nn.Module):
    """A network over three dimensions, with transposed convolutions and instance norms."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(
            nn.Conv3d(1, 16, 3, stride=2, padding=1), nn.InstanceNorm3d(16, affine=True), nn.ELU()
        )
        self.up = nn.ConvTranspose3d(16, 1, 2, stride=2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return a Dice loss."""
        volume = x.reshape(len(x), 1, 48, 60, 8)
        wanted = (volume > 0.5).to(x.dtype)
        found = torch.sigmoid(self.up(self.down(volume)))
        both = (found * wanted).flatten(1).sum(1)
        return 1 - (2 * both / (found + wanted).flatten(1).sum(1).clamp_min(1)).mean() + 0 * y.float().mean()


class Kernels(nn.Module):
    """A Gaussian process: a Cholesky factor and triangular solves of the batch's kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(300, 256), nn.SELU(), nn.Linear(256, 16))
        self.scale = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the negative log marginal likelihood."""
        z = self.body(x) * self.scale.exp()
        distance = (z[:, None] - z[None]).square().sum(-1)
        kernel = torch.exp(-0.5 * distance) + 0.1 * torch.eye(len(x), device=x.device)
        factor = torch.linalg.cholesky(kernel)
        target = y.to(z.dtype)[:, None]
        solved = torch.linalg.solve_triangular(factor, target, upper=False)
        return 0.5 * solved.square().sum() + factor.diagonal().log().sum()


BATCHES = {
    **dict.fromkeys(("OwnFunction", "Penalised", "Flow", "Kernels"), "vectors"),
    **dict.fromkeys(("Normalised", "Quantiser", "Graph", "Clipped", "Recurrent", "Aligned"), "sequences"),
    **dict.fromkeys(("Spectral", "Warped", "Volumes"), "images"),
}
"""The function of each module's batch."""
