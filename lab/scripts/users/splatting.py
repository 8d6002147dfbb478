"""Gaussian splatting in plain PyTorch: sorted compositing in tiles, densification that grows parameters and their states."""

import torch
import torch.nn.functional as F

torch.manual_seed(0)
device, n = "cuda", 6000
params = {
    "xy": torch.rand(n, 2, device=device),
    "scale": torch.full((n, 2), -4.0, device=device),
    "angle": torch.zeros(n, 1, device=device),
    "colour": torch.rand(n, 3, device=device),
    "opacity": torch.zeros(n, 1, device=device),
    "depth": torch.rand(n, 1, device=device),
}
params = {k: torch.nn.Parameter(v) for k, v in params.items()}
opt = torch.optim.Adam([{"params": [v], "lr": 1e-3, "name": k} for k, v in params.items()], eps=1e-15)


def render(p, pixels):
    c, s = torch.cos(p["angle"]), torch.sin(p["angle"])
    R = torch.cat([c, -s, s, c], 1).view(-1, 2, 2)
    inv = R @ torch.diag_embed(torch.exp(-2 * p["scale"])) @ R.transpose(1, 2)
    order = p["depth"][:, 0].argsort()
    delta = pixels[:, None] - p["xy"][order][None]
    power = -0.5 * torch.einsum("pni,nij,pnj->pn", delta, inv[order], delta)
    alpha = (torch.sigmoid(p["opacity"][order])[:, 0] * torch.exp(power)).clamp(max=0.99)
    trans = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha[:, :-1]], 1), 1)
    return (alpha * trans) @ p["colour"][order]


def grow(mask):
    for group in opt.param_groups:
        old = group["params"][0]
        state = opt.state.pop(old, None)
        extra = old[mask].detach()
        new = torch.nn.Parameter(torch.cat([old.detach(), extra + 0.001 * torch.randn_like(extra)]))
        group["params"][0] = params[group["name"]] = new
        if state is not None:
            for k in ("exp_avg", "exp_avg_sq"):
                state[k] = torch.cat([state[k], torch.zeros_like(extra)])
            opt.state[new] = state


for step in range(8):
    pixels = torch.rand(1024, 2, device=device)
    loss = F.l1_loss(render(params, pixels), torch.rand(1024, 3, device=device))
    loss.backward()
    opt.step()
    opt.zero_grad(set_to_none=True)
    if step % 2 == 0:
        grow(torch.arange(len(params["xy"]), device=device) % 4 == 0)
    print(step, loss.item(), len(params["xy"]))
