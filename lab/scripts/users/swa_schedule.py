"""Stochastic weight averaging with torch.optim.swa_utils, and batch statistics updated at the end."""

import torch, torch.nn as nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils.data import DataLoader, TensorDataset


class Mixer(nn.Module):
    def __init__(self, patches=64, dim=512, depth=6, classes=100):
        super().__init__()
        self.stem = nn.Linear(192, dim)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({
                "bn1": nn.BatchNorm1d(patches), "mix": nn.Sequential(nn.Linear(patches, 256), nn.GELU(), nn.Linear(256, patches)),
                "bn2": nn.BatchNorm1d(patches), "mlp": nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * dim, dim)),
            }) for _ in range(depth)
        )  # fmt: skip
        self.head = nn.Linear(dim, classes)

    def forward(self, x):
        b, c, h, w = x.shape
        x = x.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 1, 4, 5).reshape(b, -1, c * 64)
        x = self.stem(x)
        for k in self.blocks:
            x = x + k["mix"](k["bn1"](x).transpose(1, 2)).transpose(1, 2)
            x = x + k["mlp"](k["bn2"](x))
        return self.head(x.mean(1))


device = torch.device("cuda:0")
data = TensorDataset(torch.randn(1024, 3, 64, 64), torch.randint(0, 100, (1024,)))
loader = DataLoader(data, batch_size=128, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True)
model = Mixer().to(device)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
plain = torch.optim.lr_scheduler.MultiStepLR(opt, [1])
swa, swa_sched = AveragedModel(model), SWALR(opt, swa_lr=0.05, anneal_epochs=1)
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999), use_buffers=True)
loss_of = nn.CrossEntropyLoss(label_smoothing=0.05)
for epoch in range(2):
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        opt.zero_grad()
        loss_of(model(x), y).backward()
        opt.step()
        ema.update_parameters(model)
        if epoch >= 0:
            swa.update_parameters(model)
    swa_sched.step() if epoch else plain.step()
update_bn(loader, swa, device=device)
torch.save({"swa": swa.state_dict(), "ema": ema.state_dict()}, "averaged.pt")
