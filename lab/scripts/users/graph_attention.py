import argparse, time
import torch, torch.nn as nn, torch.nn.functional as F

p = argparse.ArgumentParser()
p.add_argument("--nodes", type=int, default=20000)
p.add_argument("--edges", type=int, default=200000)
p.add_argument("--hidden", type=int, default=256)
p.add_argument("--epochs", type=int, default=10)
p.add_argument("--model", default="gat")
args = p.parse_args()
torch.manual_seed(0)
dev = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
src, dst = torch.randint(0, args.nodes, (2, args.edges))
ei = torch.stack([torch.cat([src, dst, torch.arange(args.nodes)]), torch.cat([dst, src, torch.arange(args.nodes)])]).to(
    dev
)
x = torch.randn(args.nodes, 500, device=dev)
y = torch.randint(0, 40, (args.nodes,), device=dev)
train_mask = torch.zeros(args.nodes, dtype=torch.bool)
train_mask[torch.randperm(args.nodes)[: args.nodes // 2]] = True
train_mask = train_mask.to(dev)


class SAGELayer(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.l, self.r = nn.Linear(i, o), nn.Linear(i, o, bias=False)

    def forward(self, x, ei):
        out = torch.zeros_like(x)
        cnt = torch.zeros(x.size(0), device=x.device)
        out.index_add_(0, ei[1], x[ei[0]])
        cnt.scatter_add_(0, ei[1], torch.ones(ei.size(1), device=x.device))
        return self.l(out / cnt.clamp(min=1).unsqueeze(-1)) + self.r(x)


class GATLayer(nn.Module):
    def __init__(self, i, o, heads=4):
        super().__init__()
        self.h, self.d = heads, o // heads
        self.lin = nn.Linear(i, o, bias=False)
        self.a = nn.Parameter(torch.empty(2, heads, self.d))
        nn.init.xavier_uniform_(self.a)

    def forward(self, x, ei):
        z = self.lin(x).view(-1, self.h, self.d)
        e = F.leaky_relu((z * self.a[0]).sum(-1)[ei[0]] + (z * self.a[1]).sum(-1)[ei[1]], 0.2)
        m = torch.full((x.size(0), self.h), float("-inf"), device=x.device)
        m = m.scatter_reduce(0, ei[1].unsqueeze(-1).expand_as(e), e, reduce="amax")
        e = (e - m[ei[1]]).exp()
        s = torch.zeros(x.size(0), self.h, device=x.device).index_add(0, ei[1], e)
        alpha = F.dropout(e / (s[ei[1]] + 1e-16), 0.1, self.training)
        return torch.zeros_like(z).index_add(0, ei[1], z[ei[0]] * alpha.unsqueeze(-1)).flatten(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        L = {"sage": SAGELayer, "gat": GATLayer}[args.model]
        self.a, self.b, self.o = L(500, args.hidden), L(args.hidden, args.hidden), nn.Linear(args.hidden, 40)

    def forward(self, x, g):
        x = F.dropout(F.relu(self.a(x, g)), 0.5, training=self.training)
        x = F.dropout(F.relu(self.b(x, g)), 0.5, training=self.training)
        return F.log_softmax(self.o(x), dim=1)


model = Net().to(dev)
opt = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)


@torch.no_grad()
def test():
    model.eval()
    pred = model(x, ei).argmax(dim=-1)
    return [int((pred[mask] == y[mask]).sum()) / int(mask.sum()) for mask in (train_mask, ~train_mask)]


for epoch in range(args.epochs):
    t = time.time()
    model.train()
    opt.zero_grad()
    loss = F.nll_loss(model(x, ei)[train_mask], y[train_mask])
    loss.backward()
    opt.step()
    print(f"Epoch: {epoch + 1:04d} loss: {loss.item():.4f} acc: {test()} {time.time() - t:.3f}s")
