import torch, torch.nn as nn
import torch.nn.utils.prune as prune
from torch.nn.utils.parametrizations import weight_norm, spectral_norm, orthogonal
from torch.nn.utils import parametrize


class Symmetric(nn.Module):
    def forward(self, X):
        return X.triu() + X.triu(1).transpose(-1, -2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = weight_norm(nn.Conv1d(80, 512, 7, padding=3))
        self.c2 = spectral_norm(nn.Conv1d(512, 512, 5, padding=2))
        self.lin = nn.Linear(512, 512)
        parametrize.register_parametrization(self.lin, "weight", Symmetric())
        self.ort = orthogonal(nn.Linear(512, 256))
        self.out = nn.Linear(256, 10)

    def forward(self, x):
        x = torch.relu(self.c1(x))
        x = torch.relu(self.c2(x)).mean(-1)
        return self.out(torch.relu(self.ort(torch.relu(self.lin(x)))))


m = Net().cuda()
prune.l1_unstructured(m.out, name="weight", amount=0.3)
prune.random_unstructured(m.c1, name="bias", amount=0.1) if hasattr(m.c1, "bias") else None
opt = torch.optim.RMSprop(m.parameters(), lr=1e-3, momentum=0.9, centered=True)
for i in range(6):
    x, y = torch.randn(32, 80, 400, device="cuda"), torch.randint(10, (32,), device="cuda")
    loss = nn.functional.cross_entropy(m(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(i, float(loss))
prune.remove(m.out, "weight")
