"""What ``nvidia-smi`` prints about simulated GPUs."""

import pytest

from trainatomy.scripts.standins.nvidia_smi import GpuState, answer, split

pytestmark = pytest.mark.unit

GPUS = (
    GpuState("NVIDIA H100 80GB HBM3", "9.0", 80 * 2**30, 3 * 2**30),
    GpuState("NVIDIA H100 80GB HBM3", "9.0", 80 * 2**30, 0),
)


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("nvidia-smi --query-gpu=index,memory.used --format=csv", "index, memory.used [MiB]\n0, 3072 MiB\n1, 0 MiB\n"),
        ("nvidia-smi -i 1 --query-gpu=memory.free --format=csv,nounits,noheader", "81920\n"),
        ("nvidia-smi --query-gpu compute_cap,fan.speed --format csv,noheader --id=0", "9.0, [N/A]\n"),
        ("nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader -i 0", "77, 3072 MiB\n"),
        ("nvidia-smi -L --id=0", "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-00000000-0000-0000-0000-000000000000)\n"),
        ("nvidia-smi --id=7", "No devices were found\n"),
        ("nvidia-smi topo -m", None),
    ],
)
def test_answers(command: str, printed: str | None) -> None:
    assert answer(command.split(), GPUS, 77) == printed


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("/usr/bin/nvidia-smi -L 2>/dev/null | wc -l", (["/usr/bin/nvidia-smi", "-L"], "wc -l")),
        (["nvidia-smi", "-L"], (["nvidia-smi", "-L"], "")),
        ("nvidia-smi | tee log", None),
        ("nvidia-smi > log", None),
        ("nvidia-smi; touch made", None),
        ("nvidia-smi | sed -i s/a/b/ file", None),
        ("nvidia-settings -q all", None),
    ],
)
def test_only_harmless_pipelines_are_answered(command: str | list[str], expected: object) -> None:
    assert split(command) == expected
