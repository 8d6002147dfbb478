import torch, torch.nn as nn, time


class DataPrefetcher:
    def __init__(self, loader):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream()
        self.mean = torch.tensor([0.485 * 255, 0.456 * 255, 0.406 * 255]).cuda().view(1, 3, 1, 1)
        self.std = torch.tensor([0.229 * 255, 0.224 * 255, 0.225 * 255]).cuda().view(1, 3, 1, 1)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = self.next_target = None
            return
        with torch.cuda.stream(self.stream):
            self.next_input = self.next_input.cuda(non_blocking=True)
            self.next_target = self.next_target.cuda(non_blocking=True)
            self.next_input = self.next_input.float().sub_(self.mean).div_(self.std)

    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        i, t = self.next_input, self.next_target
        if i is not None:
            i.record_stream(torch.cuda.current_stream())
        if t is not None:
            t.record_stream(torch.cuda.current_stream())
        self.preload()
        return i, t


ds = torch.utils.data.TensorDataset(
    torch.randint(0, 255, (320, 3, 160, 160), dtype=torch.uint8), torch.randint(0, 1000, (320,))
)
loader = torch.utils.data.DataLoader(
    ds, batch_size=32, shuffle=True, num_workers=2, pin_memory=True, persistent_workers=True
)


def conv(i, o, s):
    return nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU6(True))


model = nn.Sequential(
    conv(3, 64, 2),
    conv(64, 128, 2),
    conv(128, 256, 2),
    conv(256, 512, 2),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Dropout(0.2),
    nn.Linear(512, 1000),
).cuda()
model = model.to(memory_format=torch.channels_last)
opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
crit = nn.CrossEntropyLoss().cuda()
for epoch in range(2):
    pf = DataPrefetcher(loader)
    x, y = pf.next()
    i = 0
    while x is not None:
        out = model(x)
        loss = crit(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        i += 1
        if i % 5 == 0:
            torch.cuda.synchronize()
            print(epoch, i, loss.item())
        x, y = pf.next()
