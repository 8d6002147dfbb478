"""Import what a script will import, before the simulated GPU appears.

Libraries that find a GPU while they are imported look for functions of a CUDA build; and the stand-ins replace what is
there when the simulated process opens.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import logging
import warnings
from importlib import import_module
from pathlib import Path

_MODULES: dict[str, tuple[str, ...]] = {
    "accelerate": ("accelerate",),
    "torchvision": ("torchvision", "torchvision.datasets", "torchvision.models", "torchvision.transforms"),
    "torchaudio": ("torchaudio",),
    "datasets": ("datasets", "datasets.load"),
    "evaluate": ("evaluate",),
    "sklearn": ("sklearn.metrics",),
    "tokenizers": ("tokenizers",),
    "transformers": (
        "transformers",
        "transformers.modeling_utils",
        "transformers.trainer",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.auto.image_processing_auto",
        "transformers.generation.configuration_utils",
        "transformers.optimization",
    ),
    "bitsandbytes": ("bitsandbytes", "bitsandbytes.functional", "bitsandbytes.optim.optimizer"),
    "peft": ("peft", "peft.peft_model"),
    "trl": ("trl", "trl.trainer.sft_trainer", "trl.trainer.dpo_trainer"),
    "diffusers": (
        "diffusers",
        "diffusers.models.modeling_utils",
        "diffusers.models.autoencoders.autoencoder_kl",
        "diffusers.models.unets.unet_2d_condition",
        "diffusers.training_utils",
        "diffusers.optimization",
    ),
    "timm": ("timm", "timm.models._builder", "timm.data.dataset_factory"),
    "lightning": ("lightning", "lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": ("pytorch_lightning",),
    "sentence_transformers": ("sentence_transformers",),
    "liger_kernel": ("liger_kernel.transformers",),
    "triton": ("triton.runtime.jit", "triton.runtime.autotuner"),
    "tensorboard": ("torch.utils.tensorboard",),
}
"""Modules to import by the library that a script imports, in this order."""
_NEEDED = {
    "transformers": ("accelerate", "torchvision", "bitsandbytes", "peft", "tokenizers"),
    "timm": ("torchvision",),
    "diffusers": ("accelerate", "torchvision", "transformers", "peft"),
    "trl": ("accelerate", "datasets", "transformers", "bitsandbytes", "peft"),
    "peft": ("accelerate", "transformers", "bitsandbytes"),
    "sentence_transformers": ("accelerate", "datasets", "transformers", "bitsandbytes", "peft"),
    "lightning": ("torchvision",),
    "pytorch_lightning": ("torchvision",),
}
"""Libraries that these import when they are there."""
_MOST_FILES = 200


def libraries_of(script: Path, *, package: Path | None = None) -> set[str]:
    """Return the libraries that a script imports, and the modules beside it that it imports."""
    found = {name.partition(".")[0] for file in files_of(script, package=package) for name in _imported(file)}
    for name in list(found):
        found.update(_NEEDED.get(name, ()))
    return found


def files_of(script: Path, *, package: Path | None = None) -> list[Path]:
    """Return a script and the modules beside it, or in ``package``, that it imports, directly or not."""
    found = [script]
    for file in found:  # grows
        for name in _imported(file) if len(found) < _MOST_FILES else ():
            for folder in {script.parent, *([package] if package else [])}:
                found += [local for local in _local_files(folder, name) if local not in found]
    return found


def _imported(file: Path) -> list[str]:
    """Return the dotted names that a file imports anywhere; [] where it cannot be parsed."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8", errors="replace"))
    except (OSError, SyntaxError, ValueError):
        return []
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def _local_files(folder: Path, name: str) -> list[Path]:
    base = folder.joinpath(*name.split("."))
    return [path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()]


def preload(libraries: set[str]) -> None:
    """Import these libraries as far as they are installed; one that fails is left to the script."""
    for name in ("bitsandbytes", "torch._dynamo", "torch.distributed.elastic"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in ("torch._dynamo", "torch.utils.cpp_extension", "torch.utils.data", "torch.optim.swa_utils"):
            with contextlib.suppress(ImportError):
                import_module(module)
        for library, modules in _MODULES.items():
            if library in libraries and importlib.util.find_spec(library) is not None:
                for module in modules:
                    with contextlib.suppress(Exception):
                        import_module(module)
