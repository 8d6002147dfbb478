"""Further modules as users write them: sparse tables, functional transforms, islands of precision, loops of cells."""

from __future__ import annotations

import torch
from live_modules import images, sequences, vectors
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["images", "sequences", "vectors"]  # the batches, by the same file as the modules


class SparseTables(nn.Module):
    """Large tables whose gradients are sparse, pooled and looked up, beside dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.single = nn.Embedding(50_000, 64, sparse=True)
        self.bag = nn.EmbeddingBag(30_000, 64, mode="sum", sparse=True)
        self.head = nn.Sequential(nn.Linear(428, 256), nn.ReLU(), nn.Linear(256, 37))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        ids = (y[:, None] * 101 + torch.arange(9, device=y.device)) % 30_000
        both = torch.cat([x, self.single(ids[:, 0]), self.bag(ids)], 1)
        return functional.cross_entropy(self.head(both), y)


class Vmapped(nn.Module):
    """An ensemble of small networks, evaluated with ``torch.vmap`` over stacked weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(6, 300, 200) / 20)
        self.second = nn.Parameter(torch.randn(6, 200, 37) / 20)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss of the members."""

        def member(first: Tensor, second: Tensor) -> Tensor:
            return functional.gelu(x @ first) @ second

        logits = torch.vmap(member)(self.first, self.second)
        return functional.cross_entropy(logits.flatten(0, 1), y.repeat(6))


class Jacobian(nn.Module):
    """A penalty on the Jacobian of the encoder, by ``torch.func``."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(300, 128), nn.Tanh(), nn.Linear(128, 12))
        self.head = nn.Linear(12, 37)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss with the contraction penalty."""
        jacobian = torch.func.vmap(torch.func.jacrev(self.encode))(x)
        return functional.cross_entropy(self.head(self.encode(x)), y) + 1e-3 * jacobian.square().sum((1, 2)).mean()


class Islands(nn.Module):
    """Parts with autocast of their own, and a part in float32 within."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(300, 1024), nn.Linear(1024, 1024)
        self.norm, self.head = nn.LayerNorm(1024), nn.Linear(1024, 37)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        with torch.autocast("cuda", dtype=torch.bfloat16):
            z = functional.silu(self.first(x))
            with torch.autocast("cuda", enabled=False):
                z = self.norm(z.float()).exp().clamp_max(9.0)
            z = self.second(z) * torch.sigmoid(self.second(z))
        with torch.autocast("cuda", enabled=False):
            return functional.cross_entropy(self.head(z.float()), y)


class Cells(nn.Module):
    """A loop of recurrent cells in Python, with states that are kept in lists."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.back = nn.GRUCell(96, 160), nn.LSTMCell(96, 160)
        self.head = nn.Linear(320, 37)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of both directions."""
        h = x.new_zeros(len(x), 160)
        g, c = x.new_zeros(len(x), 160), x.new_zeros(len(x), 160)
        forwards, backwards = [], []
        for step in range(0, x.shape[1], 6):
            h = self.cell(x[:, step], h)
            g, c = self.back(x[:, -1 - step], (g, c))
            forwards.append(h)
            backwards.append(g)
        both = torch.cat([torch.stack(forwards, 1).amax(1), torch.stack(backwards, 1).mean(1)], 1)
        return functional.cross_entropy(self.head(both), y)


class Equilibrium(nn.Module):
    """A fixed point that is found without gradients, and one more step with them."""

    def __init__(self) -> None:
        super().__init__()
        self.inject, self.turn, self.head = nn.Linear(300, 512), nn.Linear(512, 512), nn.Linear(512, 37)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss at the fixed point."""
        given = self.inject(x)
        with torch.no_grad():
            z = torch.zeros_like(given)
            for _ in range(12):
                z = torch.tanh(self.turn(z) + given)
        return functional.cross_entropy(self.head(torch.tanh(self.turn(z) + given)), y)


class Transport(nn.Module):
    """Sinkhorn's algorithm in the log domain between a batch and prototypes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(300, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 96))
        self.prototypes = nn.Parameter(torch.randn(128, 96))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the cost of the transport."""
        cost = torch.cdist(functional.normalize(self.body(x), dim=-1), functional.normalize(self.prototypes, dim=-1))
        scores = -cost / 0.1
        for _ in range(5):
            scores = scores - scores.logsumexp(1, keepdim=True)
            scores = scores - scores.logsumexp(0, keepdim=True)
        return (scores.exp() * cost).sum() + 0 * y.float().mean()


class Linearised(nn.Module):
    """Linear attention by running sums, with rotary positions that the module computes."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.head = nn.Linear(96, 3 * 128), nn.Linear(128, 96), nn.Linear(96, 37)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        q, k, v = self.qkv(x).unflatten(-1, (3, 8, 16)).unbind(2)
        angles = torch.outer(torch.arange(x.shape[1], device=x.device), 10 ** -torch.arange(8, device=x.device))
        turn = torch.polar(torch.ones_like(angles, dtype=torch.float32), angles.float())[:, None]
        q, k = (
            torch.view_as_real(torch.view_as_complex(each.float().unflatten(-1, (8, 2))) * turn).flatten(-2)
            for each in (q, k)
        )
        state = torch.einsum("bshd,bshe->bshde", functional.elu(k) + 1, v.float()).cumsum(1)
        mixed = torch.einsum("bshd,bshde->bshe", functional.elu(q) + 1, state).flatten(-2)
        return functional.cross_entropy(self.head(x + self.out(mixed)).mean(1), y)


class Critic(nn.Module):
    """Two critics with a target network in evaluation mode, and a quantile loss."""

    def __init__(self) -> None:
        super().__init__()
        self.critics = nn.ModuleList([self._critic() for _ in range(2)])
        self.target = self._critic().requires_grad_(False).eval()

    @staticmethod
    def _critic() -> nn.Sequential:
        return nn.Sequential(nn.Linear(300, 768), nn.LayerNorm(768), nn.Mish(), nn.Dropout(0.1), nn.Linear(768, 32))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the quantile Huber loss."""
        with torch.no_grad():
            wanted = self.target(x).sort(-1).values + y[:, None]
        levels = (torch.arange(32, device=x.device) + 0.5) / 32
        loss = x.new_zeros(())
        for critic in self.critics:
            difference = wanted[:, None, :] - critic(x)[:, :, None]
            huber = torch.where(difference.abs() <= 1, 0.5 * difference.square(), difference.abs() - 0.5)
            loss = loss + (torch.abs(levels[:, None] - (difference < 0).to(huber.dtype)) * huber).mean()
        return loss


class Masked(nn.Module):
    """A masked autoencoder over vectors: a random order, gathers, and tokens that are put back."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(96, 4, 256, batch_first=True, activation="gelu")
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.token, self.decode = nn.Parameter(torch.zeros(1, 1, 96)), nn.Linear(96, 96)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of what was left out."""
        order = torch.rand(x.shape[:2], device=x.device).argsort(1)
        kept = torch.gather(x, 1, order[:, :40, None].expand(-1, -1, x.shape[-1]))
        seen = self.encoder(kept)
        whole = torch.cat([seen, self.token.to(seen.dtype).expand(len(x), x.shape[1] - 40, -1)], 1)
        back = torch.gather(whole, 1, order.argsort(1)[..., None].expand(-1, -1, x.shape[-1]))
        return functional.l1_loss(self.decode(back), x) + 0 * y.float().mean()


class Tied(nn.Module):
    """An autoencoder whose decoder has the transposed weights of its encoder, with several losses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(300, 600, bias=False), nn.Linear(600, 64, bias=False)
        self.balance = nn.Parameter(torch.zeros(3))
        self.head = nn.Linear(64, 37)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the losses, weighted by their learned uncertainty."""
        code = self.second(torch.relu(self.first(x)))
        back = torch.relu(code @ self.second.weight) @ self.first.weight
        losses = torch.stack(
            [functional.mse_loss(back, x), functional.cross_entropy(self.head(code), y), code.abs().mean()]
        )
        return (losses * torch.exp(-self.balance) + self.balance).sum()


class Patches(nn.Module):
    """Patches by ``unfold``, mixed over tokens and channels, put back by ``fold``."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Sequential(nn.Linear(120, 256), nn.GELU(), nn.Linear(256, 120))
        self.channels = nn.Sequential(nn.LayerNorm(192), nn.Linear(192, 384), nn.GELU(), nn.Linear(384, 192))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of the reconstruction."""
        patches = functional.unfold(x, 8, stride=8)
        mixed = (patches + self.tokens(patches)).transpose(1, 2)
        mixed = mixed + self.channels(mixed)
        back = functional.fold(mixed.transpose(1, 2).float(), x.shape[-2:], 8, stride=8)
        return functional.mse_loss(back, x) + 0 * y.float().mean()


BATCHES = {
    **dict.fromkeys(
        ("SparseTables", "Vmapped", "Jacobian", "Islands", "Equilibrium", "Transport", "Critic", "Tied"), "vectors"
    ),
    **dict.fromkeys(("Cells", "Linearised", "Masked"), "sequences"),
    "Patches": "images",
}
"""The function of each module's batch."""
