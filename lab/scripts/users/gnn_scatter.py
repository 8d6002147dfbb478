"""Molecules: message passing with index_add and scatter_reduce, segment softmax, virtual nodes, global pooling, metrics."""

import torch
from torch import nn
import torch.nn.functional as F


def segment_softmax(score, index, count):
    top = torch.full((count, score.shape[1]), float("-inf"), device=score.device)
    top = top.scatter_reduce(0, index[:, None].expand_as(score), score, "amax", include_self=True)
    e = (score - top[index]).exp()
    total = torch.zeros(count, score.shape[1], device=score.device).index_add_(0, index, e)
    return e / (total[index] + 1e-9)


class Layer(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.q, self.k, self.v, self.e = (nn.Linear(d, d) for _ in range(4))
        self.out = nn.Sequential(nn.Linear(4 * d, 2 * d), nn.BatchNorm1d(2 * d), nn.ELU(), nn.Linear(2 * d, d))
        self.norm, self.heads = nn.LayerNorm(d), heads

    def forward(self, x, edges, attr):
        src, dst = edges
        n, d = x.shape
        k, v = self.k(x)[src] + self.e(attr), self.v(x)[src]
        score = (self.q(x)[dst] * k).view(-1, self.heads, d // self.heads).sum(-1) / (d // self.heads) ** 0.5
        w = segment_softmax(score, dst, n).repeat_interleave(d // self.heads, 1)
        message = v * w
        index = dst[:, None].expand_as(message)
        total = torch.zeros_like(x).index_add(0, dst, message)
        mean = torch.zeros_like(x).scatter_reduce(0, index, v, "mean", include_self=False)
        high = torch.zeros_like(x).scatter_reduce(0, index, v, "amax", include_self=False)
        return self.norm(x + self.out(torch.cat([x, total, mean, high], -1)))


class Net(nn.Module):
    def __init__(self, d=256, tasks=12):
        super().__init__()
        self.atom, self.bond = nn.Embedding(120, d), nn.Embedding(6, d)
        self.layers = nn.ModuleList(Layer(d) for _ in range(5))
        self.virtual, self.vmlp = nn.Embedding(1, d), nn.ModuleList(nn.Linear(d, d) for _ in range(5))
        self.head = nn.Linear(2 * d, tasks)

    def forward(self, atoms, edges, bonds, graph, graphs):
        x, e = self.atom(atoms), self.bond(bonds)
        v = self.virtual.weight.expand(graphs, -1)
        for layer, m in zip(self.layers, self.vmlp):
            x = layer(x + v[graph], edges, e)
            v = v + F.relu(m(torch.zeros_like(v).index_add_(0, graph, x)))
        ones = torch.ones(len(x), 1, device=x.device)
        count = torch.zeros(graphs, 1, device=x.device).index_add_(0, graph, ones)
        pooled = torch.zeros(graphs, x.shape[1], device=x.device).index_add_(0, graph, x)
        return self.head(torch.cat([pooled / count, v], -1))


def batch(graphs, seed):
    g = torch.Generator().manual_seed(seed)
    sizes = torch.randint(10, 60, (graphs,), generator=g)
    nodes, graph = int(sizes.sum()), torch.repeat_interleave(torch.arange(graphs), sizes)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), sizes.cumsum(0)[:-1]])
    src = torch.arange(nodes).repeat_interleave(4)
    dst = starts[graph[src]] + (torch.rand(len(src), generator=g) * sizes[graph[src]]).long()
    y = torch.randint(0, 2, (graphs, 12), generator=g).float()
    y[torch.rand(y.shape, generator=g) < 0.3] = float("nan")
    made = torch.randint(120, (nodes,), generator=g), torch.stack([src, dst]), torch.randint(6, (len(src),), generator=g), graph, y
    return [t.cuda() for t in made]


model = Net().cuda()
opt = torch.optim.RAdam(model.parameters(), 1e-3, weight_decay=1e-5, decoupled_weight_decay=True)
for epoch in range(5):
    model.train()
    atoms, edges, bonds, graph, y = batch(256, epoch % 2)
    out = model(atoms, edges, bonds, graph, 256)
    labelled = ~torch.isnan(y)
    loss = F.binary_cross_entropy_with_logits(out[labelled], y[labelled])
    loss.backward()
    opt.step()
    opt.zero_grad()
    model.eval()
    with torch.no_grad():
        atoms, edges, bonds, graph, y = batch(256, 7)
        p = model(atoms, edges, bonds, graph, 256).sigmoid()
        order = p[:, 0].argsort(descending=True)
        hits = torch.nan_to_num(y[order, 0]).cumsum(0)
        precision = (hits / torch.arange(1, 257, device="cuda")).mean()
    print(epoch, loss.item(), precision.item())
