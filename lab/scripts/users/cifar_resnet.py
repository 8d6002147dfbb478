import argparse, os, random, time
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.cuda.amp import autocast, GradScaler
from torch.utils.data import Dataset, DataLoader, random_split
from tqdm import tqdm

parser = argparse.ArgumentParser(description="CIFAR training")
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("--batch-size", default=128, type=int)
parser.add_argument("--width", default=64, type=int)
parser.add_argument("--resume", "-r", action="store_true")
parser.add_argument("--amp", action="store_true")
parser.add_argument("--seed", default=42, type=int)
args = parser.parse_args()


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


set_seed(args.seed)
device = "cuda" if torch.cuda.is_available() else "cpu"
best_acc, start_epoch = 0, 0


class FakeCIFAR(Dataset):
    def __init__(self, n):
        self.x = np.random.randint(0, 255, (n, 32, 32, 3), dtype=np.uint8)
        self.y = np.random.randint(0, 10, n)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        x = torch.from_numpy(self.x[i]).permute(2, 0, 1).float().div(255)
        x = F.pad(x, (4, 4, 4, 4))
        a, b = random.randint(0, 8), random.randint(0, 8)
        x = x[:, a : a + 32, b : b + 32]
        if random.random() < 0.5:
            x = x.flip(-1)
        return x, int(self.y[i])


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride=1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_planes, planes, 1, stride=stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet(nn.Module):
    def __init__(self, block, num_blocks, num_classes=10, w=64):
        super().__init__()
        self.in_planes = w
        self.conv1 = nn.Conv2d(3, w, 3, stride=1, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(w)
        self.layer1 = self._make_layer(block, w, num_blocks[0], 1)
        self.layer2 = self._make_layer(block, 2 * w, num_blocks[1], 2)
        self.layer3 = self._make_layer(block, 4 * w, num_blocks[2], 2)
        self.layer4 = self._make_layer(block, 8 * w, num_blocks[3], 2)
        self.linear = nn.Linear(8 * w, num_classes)

    def _make_layer(self, block, planes, n, stride):
        layers = []
        for s in [stride] + [1] * (n - 1):
            layers.append(block(self.in_planes, planes, s))
            self.in_planes = planes
        return nn.Sequential(*layers)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer4(self.layer3(self.layer2(self.layer1(out))))
        out = F.avg_pool2d(out, 4).view(out.size(0), -1)
        return self.linear(out)


train_set, val_set = random_split(FakeCIFAR(2000), [1600, 400])
trainloader = DataLoader(
    train_set, batch_size=args.batch_size, shuffle=True, num_workers=4, pin_memory=True, drop_last=True
)
testloader = DataLoader(val_set, batch_size=100, shuffle=False, num_workers=2)
net = ResNet(BasicBlock, [2, 2, 2, 2], w=args.width).to(device)
if device == "cuda":
    net = torch.nn.DataParallel(net)
if args.resume:
    ckpt = torch.load("./checkpoint/ckpt.pth")
    net.load_state_dict(ckpt["net"])
    best_acc = ckpt["acc"]
    start_epoch = ckpt["epoch"]
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
optimizer = optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
scaler = GradScaler(enabled=args.amp)


def train(epoch):
    net.train()
    train_loss = correct = total = 0
    bar = tqdm(trainloader, desc=f"epoch {epoch}")
    for batch_idx, (inputs, targets) in enumerate(bar):
        inputs, targets = inputs.to(device, non_blocking=True), targets.to(device, non_blocking=True)
        optimizer.zero_grad()
        with autocast(enabled=args.amp):
            outputs = net(inputs)
            loss = criterion(outputs, targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        train_loss += loss.item()
        _, predicted = outputs.max(1)
        total += targets.size(0)
        correct += predicted.eq(targets).sum().item()
        bar.set_postfix(
            loss=train_loss / (batch_idx + 1),
            acc=100.0 * correct / total,
            mem=f"{torch.cuda.max_memory_allocated() / 1e9:.2f}G",
        )


def test(epoch):
    global best_acc
    net.eval()
    test_loss = correct = total = 0
    with torch.no_grad():
        for inputs, targets in testloader:
            inputs, targets = inputs.to(device), targets.to(device)
            outputs = net(inputs)
            test_loss += criterion(outputs, targets).item()
            _, predicted = outputs.max(1)
            total += targets.size(0)
            correct += predicted.eq(targets).sum().item()
    acc = 100.0 * correct / total
    if acc > best_acc:
        print("Saving..")
        if not os.path.isdir("checkpoint"):
            os.mkdir("checkpoint")
        torch.save({"net": net.state_dict(), "acc": acc, "epoch": epoch}, "./checkpoint/ckpt.pth")
        best_acc = acc


for epoch in range(start_epoch, start_epoch + args.epochs):
    train(epoch)
    test(epoch)
    scheduler.step()
