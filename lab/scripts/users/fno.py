import torch, torch.nn as nn, torch.nn.functional as F


class SpectralConv2d(nn.Module):
    def __init__(self, i, o, m1, m2):
        super().__init__()
        self.i, self.o, self.m1, self.m2 = i, o, m1, m2
        scale = 1 / (i * o)
        self.weights1 = nn.Parameter(scale * torch.rand(i, o, m1, m2, dtype=torch.cfloat))
        self.weights2 = nn.Parameter(scale * torch.rand(i, o, m1, m2, dtype=torch.cfloat))

    def mul(self, a, w):
        return torch.einsum("bixy,ioxy->boxy", a, w)

    def forward(self, x):
        b = x.shape[0]
        ft = torch.fft.rfft2(x)
        out = torch.zeros(b, self.o, x.size(-2), x.size(-1) // 2 + 1, dtype=torch.cfloat, device=x.device)
        out[:, :, : self.m1, : self.m2] = self.mul(ft[:, :, : self.m1, : self.m2], self.weights1)
        out[:, :, -self.m1 :, : self.m2] = self.mul(ft[:, :, -self.m1 :, : self.m2], self.weights2)
        return torch.fft.irfft2(out, s=(x.size(-2), x.size(-1)))


class FNO2d(nn.Module):
    def __init__(self, m=12, width=32):
        super().__init__()
        self.p = nn.Linear(12, width)
        self.convs = nn.ModuleList([SpectralConv2d(width, width, m, m) for _ in range(4)])
        self.ws = nn.ModuleList([nn.Conv2d(width, width, 1) for _ in range(4)])
        self.norm = nn.InstanceNorm2d(width)
        self.q1, self.q2 = nn.Linear(width, 128), nn.Linear(128, 1)

    def forward(self, x):
        x = torch.cat((x, self.get_grid(x.shape, x.device)), dim=-1)
        x = self.p(x).permute(0, 3, 1, 2)
        for k, (c, w) in enumerate(zip(self.convs, self.ws)):
            x1 = self.norm(c(self.norm(x)))
            x = x1 + w(x)
            if k < 3:
                x = F.gelu(x)
        x = x.permute(0, 2, 3, 1)
        return self.q2(F.gelu(self.q1(x)))

    def get_grid(self, shape, device):
        b, sx, sy = shape[0], shape[1], shape[2]
        gx = torch.linspace(0, 1, sx).float().reshape(1, sx, 1, 1).repeat([b, 1, sy, 1])
        gy = torch.linspace(0, 1, sy).float().reshape(1, 1, sy, 1).repeat([b, sx, 1, 1])
        return torch.cat((gx, gy), dim=-1).to(device)


def rel_l2(x, y):
    n = x.size(0)
    d = torch.norm(x.reshape(n, -1) - y.reshape(n, -1), 2, 1)
    return torch.sum(d / torch.norm(y.reshape(n, -1), 2, 1))


model = FNO2d().cuda()
opt = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-4)
T_in, step, T = 10, 1, 5
a, u = torch.rand(64, 64, 64, T_in), torch.rand(64, 64, 64, T)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(a, u), batch_size=20, shuffle=True)
for ep in range(2):
    for xx, yy in loader:
        loss, xx, yy = 0, xx.cuda(), yy.cuda()
        for t in range(0, T, step):
            y = yy[..., t : t + step]
            im = model(xx)
            loss += rel_l2(im, y)
            pred = im if t == 0 else torch.cat((pred, im), -1)
            xx = torch.cat((xx[..., step:], im), dim=-1)
        opt.zero_grad()
        loss.backward()
        opt.step()
        print(ep, loss.item())
