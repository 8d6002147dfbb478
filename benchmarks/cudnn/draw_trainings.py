"""Draw trainings of the twenty networks at batches and images that no rule was made from, in three precisions.

python benchmarks/cudnn/draw_trainings.py --seed 20261124 --out held_out_3/networks.yaml

Each training has a batch and images of its own. Pairs that another file of cases holds are drawn again.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

import yaml

HERE = Path(__file__).parent
NETWORKS = (
    "alexnet", "convnext_tiny", "deeplabv3_resnet50", "densenet121", "efficientnet_b0", "fcn_resnet50", "googlenet",
    "inception_v3", "mnasnet1_0", "mobilenet_v2", "mobilenet_v3_large", "r3d_18", "resnet101", "resnet18", "resnet50",
    "resnext50_32x4d", "shufflenet_v2_x1_0", "squeezenet1_1", "vgg16", "wide_resnet50_2",
)  # fmt: skip
PRECISIONS = {"fp32": "", "fp16": ", fp16: true", "bf16": ", bf16: true"}
SIDES = {"clips": (80, 160), "scenes": (128, 384), "inception_v3": (292, 384), "pictures": (96, 384)}
BATCHES = {"clips": (2, 10), "scenes": (2, 16), "pictures": (4, 96)}
LARGEST = {"clips": 16 * 8 * 112**2, "scenes": 8 * 384**2, "pictures": 48 * 224**2}
"""Pixels of a batch."""


def kind_of(name: str) -> str:
    """Return what a network is trained on."""
    return "clips" if name == "r3d_18" else "scenes" if name in ("deeplabv3_resnet50", "fcn_resnet50") else "pictures"


def taken(folder: Path = HERE) -> set[tuple[str, str, int]]:
    """Return network, images and batch of the other cases."""
    found = set()
    for path in (*folder.glob("cases/*.yaml"), *folder.glob("held_out*/*.yaml")):
        for case in yaml.safe_load(path.read_text(encoding="utf-8")).values():
            network, images = (case[of]["factory"].split(":")[1] for of in ("model", "data"))
            found.add((network, images, case["train"]["per_device_train_batch_size"]))
    return found


def drawn(chance: random.Random, name: str, others: set[tuple[str, str, int]]) -> tuple[int, int]:
    """Draw a batch and the side of its images."""
    kind = kind_of(name)
    (least, most), (few, many) = SIDES.get(name, SIDES[kind]), BATCHES[kind]
    while True:
        side, batch = chance.randint(least, most), round(few * (many / few) ** chance.random())
        frames = 16 if kind == "clips" else 1
        if batch * frames * side**2 <= LARGEST[kind] and (name, f"{kind}_{side}", batch) not in others:
            return batch, side


def main() -> int:
    """Write the trainings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    others = taken()
    chance, blocks = random.Random(options.seed), []
    for name in NETWORKS:
        for precision, setting in PRECISIONS.items():
            batch, side = drawn(chance, name, others)
            blocks.append(
                f"{name}-{batch}x{side}-{precision}:\n"
                f'  model: {{factory: "benchmarks/cudnn/networks.py:{name}"}}\n'
                f'  data: {{factory: "benchmarks/cudnn/networks.py:{kind_of(name)}_{side}"}}\n'
                "  loop: pytorch\n"
                f'  train: {{per_device_train_batch_size: {batch}, optim: sgd, optim_args: "momentum=0.9"{setting}}}\n'
            )
    head = f"# Trainings drawn by draw_trainings.py --seed {options.seed}, before any was measured.\n\n"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(head + "\n".join(blocks), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
