"""GPU files: each loads, can be found by all its names, and gives a source for every number."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from trainatomy.catalog.files import read_yaml
from trainatomy.catalog.gpus import GPU, find_gpu, gpu_from_mapping, gpus
from trainatomy.errors import WorkloadError

FOLDER = Path(sys.modules[GPU.__module__].__file__ or "").parent / "gpus"
ALL = gpus()


def leaves(data, prefix=""):
    """Return the dotted names of all numbers in a GPU file and of its mappings without numbers."""
    for key, value in data.items():
        if key in ("sources", "assumed", "name", "device_name", "environment", "link", "unified_memory"):
            continue
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key


def test_the_index_names_exactly_the_files():
    assert sorted(one.id for one in ALL) == sorted(path.stem for path in FOLDER.glob("*.yaml") if path.stem != "index")
    assert len(ALL) == 105


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.id)
def test_every_number_has_a_source(one):
    data = read_yaml("gpus", f"{one.id}.yaml")
    names = {"rates_flop_per_second": "rates", "link_bytes_per_second": "links", "context": "contexts"}
    for dotted in leaves(data):
        head, dot, tail = dotted.partition(".")
        assert one.source(names.get(head, head) + dot + tail) != "unknown", dotted
    stated = [name for entry in data["sources"] for name in entry["gives"]] + list(data["assumed"])
    known = set(leaves(data))
    for name in stated:
        assert name in data or any(leaf == name or leaf.startswith(name + ".") for leaf in known), (
            f"{name} is stated but not there"
        )


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.id)
def test_numbers_are_plausible_and_consistent(one):
    assert one.memory_bytes > 7.4 * 2**30  # 8 GB cards are the smallest
    # nvidia-smi shows none where it is the host's, and none of AMD's
    assert (one.nvidia_smi_bytes is None) == (one.unified_memory or one.is_amd)
    if one.nvidia_smi_bytes is not None:
        assert one.memory_bytes <= one.nvidia_smi_bytes + 2**20
        assert one.nvidia_smi_bytes - one.memory_bytes < 0.045 * one.nvidia_smi_bytes  # reserved by the driver
    assert 1.9e11 < one.bandwidth_bytes_per_second < 1e13
    order = [one.rates[p] for p in ("fp64", "fp32", "tf32", "fp16", "fp8") if p in one.rates]
    assert order == sorted(order) and all(rate > 5e10 for rate in order)
    if one.is_amd:
        assert "bf16" in one.rates and one.architecture.startswith("gfx")
        assert [context.holding(context.loads_bytes) for context in one.contexts.values()] == [0]  # not known
        return
    assert ("bf16" in one.rates) == ("tf32" in one.rates) == (one.capability >= (8, 0))
    assert ("fp8" in one.rates) == (one.capability >= (8, 9))
    for context in one.contexts.values():
        everything = context.holding(context.loads_bytes)
        assert 2**24 < context.first_tensor_bytes <= everything < 2**31


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("v100-16gb", "v100-16gb"),
        ("V100 16GB", "v100-16gb"),
        ("H100", "h100-sxm"),
        ("h100_pcie", "h100-pcie"),
        ("RTX 3090", "rtx-3090"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-2080-ti"),
        ("A100", "a100-80gb"),
        ("4080", "rtx-4080"),
        ("rtx 4080 super", "rtx-4080-super"),
        ("4070 Ti Super", "rtx-4070-ti-super"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-server"),
        ("GB200", "gb200"),
        ("rtx4090", "rtx-4090"),
        ("RTX4070TiSuper", "rtx-4070-ti-super"),
        ("a100 80g", "a100-80gb"),
        ("A100-40GB", "a100-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb-pcie"),
        ("NVIDIA A800-SXM4-80GB", "a800-80gb"),
        ("a800", "a800-80gb"),
        ("H800", "h800-sxm"),
        ("h800 pcie", "h800-pcie"),
        ("H20", "h20"),
        ("h20 141GB", "h20-141gb"),
        ("NVIDIA H20-3e", "h20-141gb"),
        ("L40", "l40"),
        ("A10G", "a10g"),
        ("V100S", "v100s-32gb"),
        ("T4G", "t4"),
        ("RTX 4060 Ti", "rtx-4060-ti"),
        ("4060Ti 16GB", "rtx-4060-ti-16gb"),
        ("NVIDIA GeForce RTX 4080 Laptop GPU", "rtx-4080-laptop"),
        ("RTX 6000 Ada", "rtx-6000-ada"),
        ("Quadro RTX 8000", "quadro-rtx-8000"),
        ("Tesla P100-SXM2-16GB", "p100-16gb-sxm"),
        ("p100", "p100-16gb"),
        ("GB10", "dgx-spark"),
        ("NVIDIA Thor", "jetson-thor"),
        ("RTX 4000 Ada", "rtx-4000-ada"),
        ("RTX 4000 SFF Ada Generation", "rtx-4000-sff-ada"),
        ("RTX PRO 4500 Blackwell", "rtx-pro-4500"),
        ("AMD Instinct MI300X", "mi300x"),
        ("Instinct MI300X VF", "mi300x"),
        ("amd-mi355x", "mi355x"),
        ("Radeon RX 7900 XTX", "rx-7900-xtx"),
        ("rx7900xt", "rx-7900-xt"),
        ("AMD Radeon AI PRO R9700", "ai-pro-r9700"),
        ("W7900", "pro-w7900"),
    ],
)
def test_names_are_found_however_written(name, found):
    assert find_gpu(name).id == found


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.id)
def test_the_drivers_name_and_all_aliases_find_the_gpu(one):
    for name in (one.device_name, *one.aliases):
        assert find_gpu(name) is one


def test_an_unknown_gpu_suggests_the_nearest_name():
    with pytest.raises(WorkloadError, match=r"unknown GPU 'h10'.*h100"):
        find_gpu("h10")
    with pytest.raises(WorkloadError, match=r"unknown GPU 'RTX PRO'; did you mean rtx-pro-6000 or .*\? \("):
        find_gpu("RTX PRO")
    with pytest.raises(WorkloadError, match="known: k80, "):
        find_gpu("zzzzzz")


def test_h200_context_is_the_measured_one():
    context = find_gpu("h200").context()
    # NVML's used memory minus that of the idle GPU and what PyTorch reserves
    assert context.first_tensor_bytes == 1199439872 - 644939776 - 2097152
    fp32 = ["kernels", "cublas", "cublas_backward", "training"]
    assert context.holding(fp32) == 9617408000 - 644939776 - 8185184256
    assert context.holding([*fp32, "cudnn", "cudnn_backward"]) == 8531083264 - 644939776 - 7082082304
    assert context.holding(["something else"]) == context.first_tensor_bytes
    assert "measured" in find_gpu("h200").source("contexts.lazy.first_tensor_bytes")


def test_memory_reserved_by_the_h200s_driver_is_not_offered_by_cuda():
    h200 = find_gpu("h200")
    assert h200.nvidia_smi_bytes - h200.memory_bytes == pytest.approx(h200.driver_reserved_bytes, abs=2**20)


def test_the_notebooks_v100_has_the_published_context():
    v100 = find_gpu("v100-16gb")
    assert v100.context("eager-cuda-11").first_tensor_bytes == (1343 - 2) * 2**20
    with pytest.raises(WorkloadError, match="no context of v100-16gb is known for 'rocm'; known: lazy, eager-cuda-11"):
        v100.context("rocm")


def test_a_gpu_can_be_described():
    described = {"name": "Imaginary large card", "memory_bytes": 2**41, "rates_flop_per_second": {"fp32": 1e15}}
    large = gpu_from_mapping(described)
    assert (large.id, large.memory_bytes, large.nvidia_smi_bytes) == ("imaginary-large-card", 2**41, None)
    assert large.rates["fp32"] == 1e15 and large.rates["fp16"] == find_gpu("h200").rates["fp16"]
    assert large.source("memory_bytes") == "assumed: given by the user"
    assert large.source("rates.fp32") == "assumed: given by the user"
    assert "data-center/h200" in large.source("bandwidth_bytes_per_second")
    assert gpu_from_mapping({"capability": "8.6"}, base="rtx-3090").capability == (8, 6)


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"memory": 1}, "no key 'memory'"),
        ({"memory_bytes": "many"}, "memory_bytes: 'many' is not a valid value"),
        ({"capability": 9}, "capability"),
    ],
)
def test_an_invalid_description_is_explained(mapping, message):
    with pytest.raises(WorkloadError, match=message):
        gpu_from_mapping(mapping)


def test_loading_a_gpu_needs_no_torch_and_reads_one_file():
    code = (
        "import json, sys; from trainatomy.catalog.gpus import find_gpu; from trainatomy.catalog import files;"
        "find_gpu('t4');"
        "heavy = [m for m in ('torch', 'transformers', 'numpy') if m in sys.modules];"
        "print(json.dumps([files.read_yaml.cache_info().currsize, heavy]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    read, heavy = json.loads(result.stdout)
    assert (read, heavy) == (2, [])  # the index and the GPU


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("a100,h100", "`trainatomy compare`"),
        ("24GB", "--gpu-memory-bytes"),
        ("80 GiB", "--gpu-memory-bytes"),
        ("Gaudi 3", "only NVIDIA's GPUs and AMD's"),
        ("m1", "only NVIDIA's GPUs and AMD's"),
    ],
)
def test_what_is_no_name_is_answered(name: str, meant: str) -> None:
    with pytest.raises(WorkloadError) as error:
        find_gpu(name)
    assert meant in str(error.value) and "did you mean" not in str(error.value)
    assert ("describe your own" in str(error.value)) == ("memory" in meant)


def test_names_without_separators_are_no_two_gpus():
    found = {}
    for one in ALL:
        for name in (one.id, *one.aliases):
            joined = "".join(character for character in name if character.isalnum())
            assert found.setdefault(joined, one.id) == one.id
