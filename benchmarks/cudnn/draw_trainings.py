"""Draw trainings of the twenty networks at batches and images that no rule was made from, in three precisions.

python benchmarks/cudnn/draw_trainings.py --seed 20261124 --out held_out_3/networks.yaml
python benchmarks/cudnn/draw_trainings.py --seed 20261129 --usual --out held_out_6/networks.yaml

Each training has a batch and images of its own. With ``--usual`` every second one has images of the usual size.
Trainings that another file of cases holds are drawn again.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

HERE = Path(__file__).parent
NETWORKS = (
    "alexnet", "convnext_tiny", "deeplabv3_resnet50", "densenet121", "efficientnet_b0", "fcn_resnet50", "googlenet",
    "inception_v3", "mnasnet1_0", "mobilenet_v2", "mobilenet_v3_large", "r3d_18", "resnet101", "resnet18", "resnet50",
    "resnext50_32x4d", "shufflenet_v2_x1_0", "squeezenet1_1", "vgg16", "wide_resnet50_2",
)  # fmt: skip
PRECISIONS = {"fp32": "", "fp16": ", fp16: true", "bf16": ", bf16: true"}
SIDES = {"clips": (80, 160), "scenes": (128, 384), "inception_v3": (299, 384), "pictures": (96, 384)}
BATCHES = {"clips": (2, 10), "scenes": (2, 16), "pictures": (4, 96)}
LARGEST = {"clips": 16 * 8 * 112**2, "scenes": 8 * 384**2, "pictures": 48 * 224**2}
"""Pixels of a batch."""
USUAL_SIDES = {"clips": 112, "scenes": 256, "inception_v3": 299, "pictures": 224}
USUAL_BATCHES = {"clips": (2, 10), "scenes": (2, 16), "pictures": (8, 64)}
TRIES = 50
"""Draws of a usual training, after which one of any size is drawn: those of a few networks are used up."""
Training = tuple[str, str, int, str]
"""Network, images, batch, precision."""


def kind_of(name: str) -> str:
    """Return what a network is trained on."""
    return "clips" if name == "r3d_18" else "scenes" if name in ("deeplabv3_resnet50", "fcn_resnet50") else "pictures"


def taken(folder: Path = HERE) -> set[Training]:
    """Return the other cases."""
    found = set()
    for path in (*folder.glob("cases/*.yaml"), *folder.glob("held_out*/*.yaml")):
        for case in yaml.safe_load(path.read_text(encoding="utf-8")).values():
            network, images = (case[of]["factory"].split(":")[1] for of in ("model", "data"))
            setting = case["train"]
            precision = next((name for name in PRECISIONS if setting.get(name)), "fp32")
            found.add((network, images, setting["per_device_train_batch_size"], precision))
    return found


def drawn(chance: random.Random, name: str, precision: str, others: set[Training], *, usual: bool) -> tuple[int, int]:
    """Draw a batch and the side of its images."""
    kind, tries = kind_of(name), 0
    while True:
        tries += 1
        usual = usual and tries <= TRIES
        few, many = (USUAL_BATCHES if usual else BATCHES)[kind]
        side = USUAL_SIDES.get(name, USUAL_SIDES[kind]) if usual else chance.randint(*SIDES.get(name, SIDES[kind]))
        batch = round(few * (many / few) ** chance.random())
        frames = 16 if kind == "clips" else 1
        fits = usual or batch * frames * side**2 <= LARGEST[kind]
        if fits and not {(name, images, batch, precision) for images in called(name, kind, side)} & others:
            return batch, side


def called(name: str, kind: str, side: int) -> set[str]:
    """Return the names of images of one size; the usual ones have another name in older files."""
    usual = side == USUAL_SIDES.get(name, USUAL_SIDES[kind])
    plain = "large_pictures" if name == "inception_v3" else kind
    return {f"{kind}_{side}", plain} if usual else {f"{kind}_{side}"}


def blocks(seed: int, count: int, others: set[Training], *, usual: bool) -> Iterator[str]:
    """Yield the cases; those that were drawn are added to the others."""
    chance = random.Random(seed)
    for place, name in enumerate(NETWORKS):
        for order, (precision, setting) in enumerate(PRECISIONS.items()):
            for number in range(count):
                batch, side = drawn(chance, name, precision, others, usual=usual and (place + order + number) % 2 == 0)
                images = f"{kind_of(name)}_{side}"
                others.add((name, images, batch, precision))
                yield (
                    f"{name}-{batch}x{side}-{precision}:\n"
                    f'  model: {{factory: "benchmarks/cudnn/networks.py:{name}"}}\n'
                    f'  data: {{factory: "benchmarks/cudnn/networks.py:{images}"}}\n'
                    "  loop: pytorch\n"
                    f"  train: {{per_device_train_batch_size: {batch}, optim: sgd, "
                    f'optim_args: "momentum=0.9"{setting}}}\n'
                )


def main() -> int:
    """Write the trainings."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=1, help="trainings of each network in each precision")
    parser.add_argument("--usual", action="store_true", help="give every second training images of the usual size")
    options = parser.parse_args()
    cases = blocks(options.seed, options.count, taken(), usual=options.usual)
    head = f"# Trainings drawn by draw_trainings.py --seed {options.seed}, before any was measured.\n\n"
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(head + "\n".join(cases), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
