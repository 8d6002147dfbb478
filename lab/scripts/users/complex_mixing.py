"""Global filter network: complex weights in the frequency domain, and a complex-valued recurrent readout."""

import torch, torch.nn as nn


class Filter(nn.Module):
    def __init__(self, dim, h, w):
        super().__init__()
        self.weight = nn.Parameter(torch.view_as_complex(torch.randn(h, w // 2 + 1, dim, 2) * 0.02))

    def forward(self, x):
        f = torch.fft.rfft2(x, dim=(1, 2), norm="ortho")
        return torch.fft.irfft2(f * self.weight, s=x.shape[1:3], dim=(1, 2), norm="ortho")


class Block(nn.Module):
    def __init__(self, dim, h, w):
        super().__init__()
        self.n1, self.mix, self.n2 = nn.LayerNorm(dim), Filter(dim, h, w), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.scale = nn.Parameter(torch.full((dim,), 1e-2))

    def forward(self, x):
        return x + self.scale * self.mlp(self.n2(self.mix(self.n1(x))))


class Resonator(nn.Module):
    """Diagonal linear recurrence with complex poles, computed as a convolution by FFT."""

    def __init__(self, dim, state=32):
        super().__init__()
        self.log_re = nn.Parameter(torch.rand(dim, state).log())
        self.im = nn.Parameter(torch.arange(state).float().repeat(dim, 1))
        self.c = nn.Parameter(torch.randn(dim, state, dtype=torch.cfloat) * 0.1)

    def forward(self, x):
        length = x.size(1)
        poles = torch.complex(-self.log_re.exp(), self.im)
        t = torch.arange(length, device=x.device)
        kernel = 2 * torch.einsum("ds,dsl->dl", self.c, torch.exp(poles.unsqueeze(-1) * t * 0.01)).real
        fx, fk = torch.fft.rfft(x.transpose(1, 2), n=2 * length), torch.fft.rfft(kernel, n=2 * length)
        return torch.fft.irfft(fx * fk, n=2 * length)[..., :length].transpose(1, 2)


class Net(nn.Module):
    def __init__(self, dim=256, depth=6, side=16):
        super().__init__()
        self.embed = nn.Linear(3 * 16 * 16, dim)
        self.blocks = nn.Sequential(*[Block(dim, side, side) for _ in range(depth)])
        self.read, self.head, self.side = Resonator(dim), nn.Linear(dim, 1000), side

    def forward(self, img):
        b = img.size(0)
        x = img.view(b, 3, self.side, 16, self.side, 16).permute(0, 2, 4, 1, 3, 5).reshape(b, self.side, self.side, -1)
        x = self.blocks(self.embed(x)).flatten(1, 2)
        return self.head(self.read(x).mean(1))


net = Net().cuda()
opt = torch.optim.Adam(net.parameters(), 1e-3, amsgrad=True)
for it in range(4):
    img, label = torch.rand(64, 3, 256, 256, device="cuda"), torch.randint(1000, (64,), device="cuda")
    loss = nn.functional.cross_entropy(net(img), label)
    opt.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_value_(net.parameters(), 1.0)
    opt.step()
    print(f"{it} {loss.item():.4f}")
