import torch, torch.nn as nn, torch.nn.functional as F


class Net(nn.Module):
    def __init__(s, w, d):
        super().__init__()
        s.inp = nn.Linear(784, w)
        s.h = nn.ModuleList(nn.Linear(w, w) for _ in range(d))
        s.o = nn.Linear(w, 10)
        s.bn = nn.ModuleList(nn.BatchNorm1d(w) for _ in range(d))

    def forward(s, x):
        x = F.relu(s.inp(x.flatten(1)))
        for l, b in zip(s.h, s.bn):
            x = F.silu(b(l(x)))
        return s.o(x), x


teacher, student, proj = Net(4096, 4).cuda().eval(), Net(512, 2).cuda(), nn.Linear(512, 4096).cuda()
teacher.load_state_dict(teacher.state_dict())
teacher.requires_grad_(False)
opt = torch.optim.AdamW([{"params": student.parameters()}, {"params": proj.parameters(), "lr": 1e-2}], lr=1e-3)
warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=5)
cos = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 20)
sch = torch.optim.lr_scheduler.SequentialLR(opt, [warm, cos], [5])
meter = {"loss": 0.0, "n": 0}
for step in range(30):
    x, y = torch.rand(1024, 1, 28, 28, device="cuda"), torch.randint(10, (1024,), device="cuda")
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        tl, tf = teacher(x)
    with torch.autocast("cuda", torch.bfloat16):
        sl, sf = student(x)
        loss = (
            0.5 * F.cross_entropy(sl, y)
            + 0.5 * F.kl_div(F.log_softmax(sl / 4, -1), F.softmax(tl / 4, -1), reduction="batchmean") * 16
            + 0.1 * F.mse_loss(proj(sf), tf)
        )
    opt.zero_grad()
    loss.backward()
    if step % 2 == 0:
        nn.utils.clip_grad_norm_(student.parameters(), 5)
    opt.step()
    sch.step()
    meter["loss"] += loss.item() * len(x)
    meter["n"] += len(x)
    if step % 10 == 0:
        print(step, meter["loss"] / meter["n"], sch.get_last_lr())
