"""Train a convolutional network, whose size and precision are given, with ``torch.backends.cudnn.benchmark``."""

import argparse

import torch
from torch import nn


class UNet(nn.Module):
    """Three levels of convolutions, down and up again, with skip connections."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        sizes = [width, 2 * width, 4 * width]
        self.down = nn.ModuleList(self.pair(one, other) for one, other in zip([3, *sizes], sizes, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * one, one, 2, 2) for one in sizes[:-1])
        self.join = nn.ModuleList(self.pair(2 * one, one) for one in sizes[:-1])
        self.head = nn.Conv2d(width, 10, 1)

    @staticmethod
    def pair(inside: int, outside: int) -> nn.Sequential:
        first = nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(True)
        return nn.Sequential(*first, nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(True))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        kept = []
        for level, block in enumerate(self.down):
            images = block(images if level == 0 else nn.functional.max_pool2d(images, 2))
            kept.append(images)
        for level in (1, 0):
            images = self.join[level](torch.cat([self.up[level](images), kept[level]], 1))
        return self.head(images).mean((2, 3))


class Waves(nn.Module):
    """Convolutions over time, as in encoders of speech."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        layers = [nn.Conv1d(3, width, 10, 5), nn.GELU()]
        for kernel in (3, 3, 5, 2):
            layers += [nn.Conv1d(width, width, kernel, 2), nn.GELU()]
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(images.flatten(2)).mean(2))


def build(name: str) -> nn.Module:
    if name in ("unet", "waves"):
        return UNet() if name == "unet" else Waves()
    from torchvision import models

    return models.get_model(name, weights=None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("network")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--frames", type=int, default=0)
    parser.add_argument("--precision", default="float32", choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--no-tf32", action="store_true")
    given = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.deterministic = given.deterministic
    torch.backends.cudnn.allow_tf32 = not given.no_tf32
    if given.limit is not None:
        torch.backends.cudnn.benchmark_limit = given.limit
    model = build(given.network).cuda()
    shape = (given.batch_size, 3, *([given.frames] if given.frames else []), given.side, given.side)
    images, labels = torch.randn(shape).cuda(), torch.randint(0, 10, (given.batch_size,)).cuda()
    if given.channels_last:
        model, images = (each.to(memory_format=torch.channels_last) for each in (model, images))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    dtype = getattr(torch, given.precision)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    for _ in range(100):
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            scores = model(images)
            loss = nn.functional.cross_entropy(scores.float(), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
