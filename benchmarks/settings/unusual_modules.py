"""Unusual modules as users write them: routers in plain PyTorch, splines, hypernetworks, hard examples, metrics."""

from __future__ import annotations

import math

import torch
from live_modules import images, sequences, vectors
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

__all__ = ["images", "sequences", "vectors"]  # the batches, by the same file as the modules


class Routed(nn.Module):
    """A mixture of experts whose experts select their tokens by the router's choices."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.gate, self.head = nn.Linear(96, 256), nn.Linear(256, 6), nn.Linear(256, 37)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 700), nn.SiLU(), nn.Linear(700, 256)) for _ in range(6)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss, with one that balances the experts."""
        tokens = self.embed(x).flatten(0, 1)
        probabilities = self.gate(tokens).softmax(-1)
        weights, chosen = torch.topk(probabilities, 2, dim=-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, which = torch.where(chosen == number)
            if rows.numel():
                out.index_add_(0, rows, (expert(tokens[rows]) * weights[rows, which, None]).to(out.dtype))
        load = functional.one_hot(chosen[:, 0], 6).float().mean(0)
        pooled = out.view(len(x), -1, 256).mean(1)
        return functional.cross_entropy(self.head(pooled), y) + 6 * (load * probabilities.mean(0)).sum()


class Capped(nn.Module):
    """A mixture of experts of fixed capacity, by products with one-hot masks."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.head = nn.Linear(96, 8), nn.Linear(96, 37)
        self.up, self.down = nn.Parameter(torch.randn(8, 96, 384) / 10), nn.Parameter(torch.randn(8, 384, 96) / 20)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        tokens, capacity = x.flatten(0, 1), math.ceil(1.25 * x.shape[0] * x.shape[1] / 8)
        scores = self.gate(tokens).softmax(-1)
        mask = functional.one_hot(scores.argmax(-1), 8)
        place = (mask.cumsum(0) * mask - 1).clamp(max=capacity)
        slots = functional.one_hot(place.amax(-1).clamp(0, capacity), capacity + 1)[:, :capacity].to(x.dtype)
        dispatch = torch.einsum("tg,tc->tgc", (mask * scores).to(x.dtype), slots)
        given = torch.einsum("tgc,td->gcd", (dispatch > 0).to(x.dtype), tokens)
        made = functional.relu(torch.bmm(given, self.up)).square() @ self.down
        out = torch.einsum("tgc,gcd->td", dispatch, made.to(dispatch.dtype)).view_as(x)
        return functional.cross_entropy(self.head((x + out).mean(1)), y)


class Splines(nn.Module):
    """A Kolmogorov-Arnold network: B-splines on each edge."""

    grid: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, 12).repeat(300, 1))
        self.weight, self.base = nn.Parameter(torch.randn(64, 300, 8) / 50), nn.Linear(300, 64)
        self.head = nn.Linear(64, 37)

    def _bases(self, x: Tensor) -> Tensor:
        grid, x = self.grid, x[..., None]
        found = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
        for k in range(1, 4):
            left = (x - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)])
            right = (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:-k])
            found = left * found[..., :-1] + right * found[..., 1:]
        return found

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        edges = functional.linear(self._bases(x).flatten(1), self.weight.flatten(1))
        return functional.cross_entropy(self.head(self.base(functional.silu(x)) + edges), y)


class Hyper(nn.Module):
    """A network whose weights another one makes, for each sample, by ``functional_call`` under ``vmap``."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(300, 64), nn.Tanh(), nn.Linear(64, 20 * 16 + 16))
        self.small, self.head = nn.Linear(20, 16), nn.Linear(16, 37)
        self.small.requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""

        def run(made: Tensor, given: Tensor) -> Tensor:
            weights = {"weight": made[:320].view(16, 20), "bias": made[320:]}
            return torch.func.functional_call(self.small, weights, (given,)).relu().mean(0)

        found = torch.vmap(run)(self.maker(x), x.view(len(x), 15, 20))
        return functional.cross_entropy(self.head(found), y)


class HardExamples(nn.Module):
    """The hardest samples of a batch alone give the loss, with margins by angles."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(300, 700), nn.BatchNorm1d(700), nn.PReLU(), nn.Linear(700, 128))
        self.classes = nn.Parameter(torch.randn(37, 128))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean of the largest losses."""
        cosine = functional.normalize(self.body(x)) @ functional.normalize(self.classes).t()
        angle = torch.acos(cosine.float().clamp(-1 + 1e-6, 1 - 1e-6))
        margin = torch.cos(angle + 0.3 * functional.one_hot(y, 37))
        losses = functional.cross_entropy(24 * margin, y, reduction="none")
        return losses.topk(max(1, len(y) // 3)).values.mean()


class Metric(nn.Module):
    """Triplets that are mined in the batch, with distances of all pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(300, 512), nn.Mish(), nn.LayerNorm(512), nn.Linear(512, 64))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the triplet loss and one of uniformity."""
        z = functional.normalize(self.body(x).float(), dim=-1)
        distance = torch.cdist(z, z)
        same = y[:, None] == y[None]
        furthest = distance.masked_fill(~same, 0).amax(1)
        nearest = distance.masked_fill(same, 9).amin(1)
        uniform = torch.pdist(z).square().mul(-2).exp().mean().log()
        return functional.softplus(furthest - nearest + 0.2).mean() + 0.1 * uniform


class Sampled(nn.Module):
    """Discrete codes by Gumbel softmax, a variational bottleneck, and losses of distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.codes = nn.Linear(300, 2 * 64 + 8 * 24), nn.Embedding(24, 16)
        self.decode = nn.Sequential(nn.Linear(64 + 128, 512), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(512, 300))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the evidence lower bound."""
        mean, scale, logits = self.encode(x).split([64, 64, 192], -1)
        normal = torch.distributions.Normal(mean.float(), functional.softplus(scale.float()) + 1e-4)
        hard = functional.gumbel_softmax(logits.view(-1, 8, 24).float(), tau=0.7, hard=True)
        z = torch.cat([normal.rsample(), (hard @ self.codes.weight).flatten(1)], -1)
        kept = torch.distributions.kl_divergence(normal, torch.distributions.Normal(0.0, 1.0)).sum(-1).mean()
        return functional.smooth_l1_loss(self.decode(z), x) + 1e-3 * kept + 0 * y.float().mean()


class Encoded(nn.Module):
    """PyTorch's own transformer layers: an encoder with padding, a decoder with a causal mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.query = nn.Linear(96, 192), nn.Parameter(torch.randn(20, 192))
        layer = nn.TransformerEncoderLayer(192, 6, 512, 0.1, functional.gelu, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(192, 4, 512, batch_first=True), 2)
        self.head = nn.Linear(192, 37)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        pads = torch.arange(x.shape[1], device=x.device)[None] >= (x.shape[1] - y[:, None])
        memory = self.encoder(self.embed(x), src_key_padding_mask=pads)
        causal = nn.Transformer.generate_square_subsequent_mask(20, device=x.device)
        out = self.decoder(self.query.expand(len(x), -1, -1), memory, tgt_mask=causal, memory_key_padding_mask=pads)
        return functional.cross_entropy(self.head(out).transpose(1, 2), y[:, None].expand(-1, 20))


class Scanned(nn.Module):
    """A state-space layer in plain PyTorch: a scan in logarithms, and a depthwise convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.local = nn.Linear(96, 3 * 128), nn.Conv1d(128, 128, 4, padding=3, groups=128)
        self.norm, self.head = nn.RMSNorm(128), nn.Linear(128, 37)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        value, gate, decay = self.mix(x).chunk(3, -1)
        value = self.local(value.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        kept = functional.logsigmoid(decay.float()).cumsum(1)
        scanned = torch.logcumsumexp(functional.softplus(value.float()).log() - kept, 1) + kept
        z = self.norm(scanned.exp() * functional.silu(gate))
        return functional.cross_entropy(self.head(z.flip(1)[:, 0]), y)


class Orthogonal(nn.Module):
    """Orthogonal and weight-normed layers, ``checkpoint_sequential``, and bilinear heads."""

    def __init__(self) -> None:
        super().__init__()
        turn = parametrizations.orthogonal(nn.Linear(300, 300), orthogonal_map="cayley")
        self.body = nn.Sequential(
            turn, nn.Softsign(), parametrizations.weight_norm(nn.Linear(300, 640)), nn.GLU(), nn.Linear(320, 300)
        )
        self.pair = nn.Bilinear(300, 48, 37)
        self.side = nn.Linear(300, 48)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss."""
        z = torch.utils.checkpoint.checkpoint_sequential(self.body, 2, x, use_reentrant=False)
        return functional.multi_margin_loss(self.pair(z, self.side(x)).float(), y) + z.float().var(0).mean()


class Gridded(nn.Module):
    """Multi-resolution hash tables, trilinear weights, and sorted samples along rays."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(2**14, 4) for _ in range(6))
        self.colour = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 4))

    def _features(self, points: Tensor) -> Tensor:
        found = []
        for level, table in enumerate(self.tables):
            scaled = points * 2 ** (level + 3)
            low = scaled.floor().long()
            corners = low[..., None, :] + torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]], device=points.device)
            hashed = (corners[..., 0] ^ (corners[..., 1] * 2654435761)) % 2**14
            near = 1 - (scaled[..., None, :] - corners).abs()
            found.append((table(hashed) * near.prod(-1, keepdim=True)).sum(-2))
        return torch.cat(found, -1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss of the rendered rays."""
        points = torch.sigmoid(x[:, :128].reshape(len(x), 64, 2))
        depth, order = points[..., 0].sort(1)
        out = self.colour(self._features(points.gather(1, order[..., None].expand_as(points))))
        density = functional.softplus(out[..., 3]) * functional.pad(depth.diff(dim=1), (0, 1), value=1.0)
        seen = 1 - torch.exp(-density)
        through = torch.cumprod(functional.pad(1 - seen + 1e-6, (1, 0), value=1.0), 1)[:, :-1]
        rendered = (seen * through)[..., None] * out[..., :3].sigmoid()
        return functional.mse_loss(rendered.sum(1), x[:, :3]) + 0 * y.float().mean()


class Sliced(nn.Module):
    """A one-dimensional U-Net with pixel shuffling, group norms, skips and a loss of spectra."""

    def __init__(self) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv1d(96, 64, 5, 2, 2), nn.GroupNorm(8, 64), nn.SiLU())
        self.down2 = nn.Sequential(nn.Conv1d(64, 128, 5, 3, 1), nn.GroupNorm(8, 128), nn.SiLU())
        self.up2, self.up1 = nn.ConvTranspose1d(128, 64, 3, 3), nn.ConvTranspose1d(128, 96, 4, 2, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the loss in time and in frequency."""
        wave = x.transpose(1, 2)
        first = self.down1(wave)
        second = functional.interpolate(self.up2(self.down2(first)).float(), size=first.shape[-1], mode="linear")
        found = self.up1(torch.cat([first, second.to(first.dtype)], 1))[..., : wave.shape[-1]]
        spectrum = torch.fft.rfft(found.float(), dim=-1).abs() - torch.fft.rfft(wave.float(), dim=-1).abs()
        return functional.l1_loss(found, wave) + 0.1 * spectrum.square().mean() + 0 * y.float().mean()


class Segmented(nn.Module):
    """Means over segments by ``scatter_reduce`` and ``index_reduce``, buckets, and a ranking loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(5000, 96, mode="mean", padding_idx=0)
        self.body = nn.Sequential(nn.Linear(192, 320), nn.Softplus(), nn.Linear(320, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return a pairwise loss of scores."""
        edges = torch.linspace(-2, 2, 99, device=x.device)
        buckets = torch.bucketize(x.mean(-1), edges) * 40 + y[:, None] % 40
        given = torch.cat([self.embed(buckets), x.new_zeros(37, 96).index_reduce(0, y, x[:, 0], "mean")[y]], 1)
        score = self.body(given).squeeze(-1).float()
        best = score.new_zeros(37).scatter_reduce(0, y, score, "amax", include_self=False)
        return functional.margin_ranking_loss(best[y], score, torch.ones_like(score), margin=0.1)


BATCHES = {
    **dict.fromkeys(("Splines", "Hyper", "HardExamples", "Metric", "Sampled", "Orthogonal", "Gridded"), "vectors"),
    **dict.fromkeys(("Routed", "Capped", "Encoded", "Scanned", "Sliced", "Segmented"), "sequences"),
}
"""The function of each module's batch."""
