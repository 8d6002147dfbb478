import numpy as np, torch, torch.nn as nn

torch.set_default_dtype(torch.float32)
device = torch.device("cuda")
H = W = 100
focal = 138.0
N_rays, N_samples, N_imp = 2048, 64, 64


def get_rays(H, W, focal, c2w):
    i, j = torch.meshgrid(
        torch.arange(W, dtype=torch.float32, device=device),
        torch.arange(H, dtype=torch.float32, device=device),
        indexing="xy",
    )
    dirs = torch.stack([(i - W * 0.5) / focal, -(j - H * 0.5) / focal, -torch.ones_like(i)], -1)
    d = torch.sum(dirs[..., None, :] * c2w[:3, :3], -1)
    return c2w[:3, -1].expand(d.shape), d


class PE(nn.Module):
    def __init__(self, L):
        super().__init__()
        self.register_buffer("f", 2.0 ** torch.arange(L))

    def forward(self, x):
        return torch.cat([x] + [fn(x * f) for f in self.f for fn in (torch.sin, torch.cos)], -1)


class NeRF(nn.Module):
    def __init__(self, D=8, W=256, L=10, Ld=4):
        super().__init__()
        self.pe, self.ped = PE(L), PE(Ld)
        i = 3 + 6 * L
        self.layers = nn.ModuleList([nn.Linear(i, W)] + [nn.Linear(W + (i if k == 4 else 0), W) for k in range(D - 1)])
        self.sigma, self.feat = nn.Linear(W, 1), nn.Linear(W, W)
        self.rgb = nn.Sequential(nn.Linear(W + 3 + 6 * Ld, W // 2), nn.ReLU(True), nn.Linear(W // 2, 3))

    def forward(self, x, d):
        x = self.pe(x)
        h = x
        for k, l in enumerate(self.layers):
            if k == 5:
                h = torch.cat([x, h], -1)
            h = torch.relu(l(h))
        return torch.cat([self.rgb(torch.cat([self.feat(h), self.ped(d)], -1)), self.sigma(h)], -1)


def raw2out(raw, z, d):
    dists = torch.cat([z[..., 1:] - z[..., :-1], torch.full_like(z[..., :1], 1e10)], -1) * d[..., None, :].norm(dim=-1)
    alpha = 1 - torch.exp(-torch.relu(raw[..., 3]) * dists)
    w = (
        alpha
        * torch.cumprod(torch.cat([torch.ones((alpha.shape[0], 1), device=device), 1 - alpha + 1e-10], -1), -1)[:, :-1]
    )
    return torch.sum(w[..., None] * torch.sigmoid(raw[..., :3]), -2), w


def sample_pdf(bins, w, n):
    w = w + 1e-5
    cdf = torch.cumsum(w / w.sum(-1, keepdim=True), -1)
    cdf = torch.cat([torch.zeros_like(cdf[..., :1]), cdf], -1)
    u = torch.rand(list(cdf.shape[:-1]) + [n], device=device).contiguous()
    inds = torch.searchsorted(cdf, u, right=True)
    below, above = (inds - 1).clamp(min=0), inds.clamp(max=cdf.shape[-1] - 1)
    g = torch.stack([below, above], -1)
    sh = [g.shape[0], g.shape[1], cdf.shape[-1]]
    cg = torch.gather(cdf.unsqueeze(1).expand(sh), 2, g)
    bg = torch.gather(bins.unsqueeze(1).expand(sh), 2, g)
    den = cg[..., 1] - cg[..., 0]
    den = torch.where(den < 1e-5, torch.ones_like(den), den)
    return bg[..., 0] + (u - cg[..., 0]) / den * (bg[..., 1] - bg[..., 0])


coarse, fine = NeRF().to(device), NeRF().to(device)
opt = torch.optim.Adam(list(coarse.parameters()) + list(fine.parameters()), lr=5e-4)
images = np.random.rand(10, H, W, 3).astype(np.float32)
poses = np.tile(np.eye(4, dtype=np.float32), (10, 1, 1))
poses[:, 2, 3] = 4
for it in range(20):
    k = np.random.randint(10)
    target, pose = torch.from_numpy(images[k]).to(device), torch.from_numpy(poses[k]).to(device)
    o, d = get_rays(H, W, focal, pose)
    coords = torch.stack(torch.meshgrid(torch.arange(H), torch.arange(W), indexing="ij"), -1).reshape(-1, 2)
    sel = coords[np.random.choice(coords.shape[0], N_rays, replace=False)].to(device)
    o, d, t = o[sel[:, 0], sel[:, 1]], d[sel[:, 0], sel[:, 1]], target[sel[:, 0], sel[:, 1]]
    z = torch.linspace(2.0, 6.0, N_samples, device=device).expand(N_rays, N_samples)
    z = z + torch.rand_like(z) * 4 / N_samples
    pts = o[:, None] + d[:, None] * z[..., None]
    vd = (d / d.norm(dim=-1, keepdim=True))[:, None].expand(pts.shape)
    rgb0, w = raw2out(coarse(pts, vd), z, d)
    zs = sample_pdf(0.5 * (z[..., 1:] + z[..., :-1]), w[..., 1:-1].detach(), N_imp)
    z2, _ = torch.sort(torch.cat([z, zs], -1), -1)
    pts = o[:, None] + d[:, None] * z2[..., None]
    rgb, _ = raw2out(fine(pts, (d / d.norm(dim=-1, keepdim=True))[:, None].expand(pts.shape)), z2, d)
    loss = ((rgb - t) ** 2).mean() + ((rgb0 - t) ** 2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
    for g in opt.param_groups:
        g["lr"] = 5e-4 * 0.1 ** (it / 250000)
    if it % 5 == 0:
        print(it, loss.item(), "psnr", -10 * np.log10(loss.item() + 1e-12))
