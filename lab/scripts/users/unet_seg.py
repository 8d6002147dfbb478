import argparse, logging, os, random, sys, torch, torch.nn as nn, torch.nn.functional as F
from pathlib import Path
from torch import optim
from torch.utils.data import DataLoader, random_split, Dataset
from tqdm import tqdm


class DoubleConv(nn.Module):
    def __init__(s, i, o, m=None):
        super().__init__()
        m = m or o
        s.double_conv = nn.Sequential(
            nn.Conv2d(i, m, 3, padding=1, bias=False),
            nn.BatchNorm2d(m),
            nn.ReLU(inplace=True),
            nn.Conv2d(m, o, 3, padding=1, bias=False),
            nn.BatchNorm2d(o),
            nn.ReLU(inplace=True),
        )

    def forward(s, x):
        return s.double_conv(x)


class Up(nn.Module):
    def __init__(s, i, o, bilinear):
        super().__init__()
        if bilinear:
            s.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
            s.conv = DoubleConv(i, o, i // 2)
        else:
            s.up = nn.ConvTranspose2d(i, i // 2, 2, 2)
            s.conv = DoubleConv(i, o)

    def forward(s, x1, x2):
        x1 = s.up(x1)
        dy, dx = x2.size(2) - x1.size(2), x2.size(3) - x1.size(3)
        x1 = F.pad(x1, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return s.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    def __init__(s, n_channels, n_classes, bilinear=False):
        super().__init__()
        s.n_channels, s.n_classes, s.bilinear = n_channels, n_classes, bilinear
        s.inc = DoubleConv(n_channels, 32)
        s.downs = nn.ModuleList([nn.Sequential(nn.MaxPool2d(2), DoubleConv(32 * 2**k, 64 * 2**k)) for k in range(3)])
        f = 1
        s.ups = nn.ModuleList([Up(256, 128, bilinear), Up(128, 64, bilinear), Up(64, 32, bilinear)])
        s.outc = nn.Conv2d(32, n_classes, 1)

    def forward(s, x):
        xs = [s.inc(x)]
        for d in s.downs:
            xs.append(d(xs[-1]))
        y = xs.pop()
        for u in s.ups:
            y = u(y, xs.pop())
        return s.outc(y)


def dice_loss(inp, target):
    inter = 2 * (inp * target).sum(dim=(-1, -2))
    sets = inp.sum(dim=(-1, -2)) + target.sum(dim=(-1, -2))
    sets = torch.where(sets == 0, inter, sets)
    return 1 - ((inter + 1e-6) / (sets + 1e-6)).mean()


class Blobs(Dataset):
    def __len__(s):
        return 60

    def __getitem__(s, i):
        img = torch.rand(3, 192, 256)
        m = torch.zeros(192, 256, dtype=torch.long)
        m[40:90, 60:120] = 1
        return {"image": img, "mask": m}


@torch.inference_mode()
def evaluate(net, dl, device, amp):
    net.eval()
    score = 0
    with torch.autocast(device.type if device.type != "mps" else "cpu", enabled=amp):
        for batch in tqdm(dl, total=len(dl), desc="Validation", leave=False):
            image, mask = (
                batch["image"].to(device=device, dtype=torch.float32, memory_format=torch.channels_last),
                batch["mask"].to(device=device, dtype=torch.long),
            )
            pred = net(image)
            assert mask.min() >= 0 and mask.max() < net.n_classes
            oh = F.one_hot(mask, net.n_classes).permute(0, 3, 1, 2).float()
            pr = F.one_hot(pred.argmax(dim=1), net.n_classes).permute(0, 3, 1, 2).float()
            score += 1 - dice_loss(pr[:, 1:], oh[:, 1:])
    net.train()
    return score / max(len(dl), 1)


def train_model(
    model,
    device,
    epochs=3,
    batch_size=4,
    lr=1e-5,
    val_percent=0.1,
    amp=False,
    weight_decay=1e-8,
    momentum=0.999,
    clip=1.0,
):
    ds = Blobs()
    n_val = int(len(ds) * val_percent)
    tr, va = random_split(ds, [len(ds) - n_val, n_val], generator=torch.Generator().manual_seed(0))
    la = dict(batch_size=batch_size, num_workers=os.cpu_count(), pin_memory=True)
    tl, vl = DataLoader(tr, shuffle=True, **la), DataLoader(va, shuffle=False, drop_last=True, **la)
    opt = optim.RMSprop(model.parameters(), lr=lr, weight_decay=weight_decay, momentum=momentum, foreach=True)
    sch = optim.lr_scheduler.ReduceLROnPlateau(opt, "max", patience=5)
    scaler = torch.cuda.amp.GradScaler(enabled=amp)
    crit = nn.CrossEntropyLoss()
    step = 0
    for epoch in range(1, epochs + 1):
        model.train()
        el = 0
        with tqdm(total=len(tr), desc=f"Epoch {epoch}/{epochs}", unit="img") as pbar:
            for batch in tl:
                images, masks = batch["image"], batch["mask"]
                assert images.shape[1] == model.n_channels
                images, masks = (
                    images.to(device=device, dtype=torch.float32, memory_format=torch.channels_last),
                    masks.to(device=device, dtype=torch.long),
                )
                with torch.autocast(device.type if device.type != "mps" else "cpu", enabled=amp):
                    p = model(images)
                    loss = crit(p, masks)
                    loss += dice_loss(
                        F.softmax(p, dim=1).float(), F.one_hot(masks, model.n_classes).permute(0, 3, 1, 2).float()
                    )
                opt.zero_grad(set_to_none=True)
                scaler.scale(loss).backward()
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
                scaler.step(opt)
                scaler.update()
                pbar.update(images.shape[0])
                step += 1
                el += loss.item()
                pbar.set_postfix(**{"loss (batch)": loss.item()})
                div = len(tr) // (5 * batch_size)
                if div > 0 and step % div == 0:
                    hist = {}
                    for tag, v in model.named_parameters():
                        if not (torch.isinf(v) | torch.isnan(v)).any():
                            hist["W/" + tag] = v.data.cpu().numpy().mean()
                        if not (torch.isinf(v.grad) | torch.isnan(v.grad)).any():
                            hist["G/" + tag] = v.grad.data.cpu()
                    vs = evaluate(model, vl, device, amp)
                    sch.step(vs)
                    logging.info("Validation Dice score: {}".format(vs))
        Path("ckpts").mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), f"ckpts/checkpoint_epoch{epoch}.pth")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", "-e", type=int, default=3)
    ap.add_argument("--batch-size", "-b", dest="bs", type=int, default=8)
    ap.add_argument("--amp", action="store_true")
    ap.add_argument("--bilinear", action="store_true")
    args = ap.parse_args()
    logging.basicConfig(level=logging.INFO)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logging.info(f"Using device {device}")
    model = UNet(3, 2, args.bilinear)
    model = model.to(memory_format=torch.channels_last)
    model.to(device=device)
    try:
        train_model(model, device, args.epochs, args.bs, amp=args.amp)
    except torch.cuda.OutOfMemoryError:
        logging.error("Detected OutOfMemoryError!")
        torch.cuda.empty_cache()
        train_model(model, device, args.epochs, args.bs, amp=args.amp)
