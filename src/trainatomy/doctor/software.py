"""Versions of driver and libraries, and environment variables; with what the probe said about torch and CUDA."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from trainatomy.catalog.machine import extensions, variable
from trainatomy.doctor.gpus import DriverState
from trainatomy.libraries import LIBRARIES, version_of
from trainatomy.results.machine import Extension, Software

_PINNED = re.compile(r"^(?P<name>nvidia-[\w-]+|triton)\s*==\s*(?P<version>[\w.+]+)")
_BITSANDBYTES = re.compile(r"libbitsandbytes_cuda(?P<major>\d\d)(?P<minor>\d+)")
_ALSO = ("triton", "kernels", "nvidia-ml-py")


def read_software(driver: DriverState, probed: Mapping[str, Any]) -> Software:
    """Return what is installed, with what ``doctor.probe`` said."""
    torch: Mapping[str, Any] = probed.get("torch", {})
    required = _required()
    names = (*LIBRARIES, *_ALSO, *required, *(each.package for each in extensions()))
    versions = {name: version for name in names if (version := version_of(name)) is not None}
    return Software(
        python=platform.python_version(),
        driver=driver.version,
        driver_cuda=driver.cuda,
        driver_error=driver.error,
        torch=torch.get("torch") or version_of("torch"),
        torch_cuda=torch.get("torch_cuda"),
        cuda_error=_cuda_error(probed),
        architectures=tuple(torch.get("architectures", ())),
        versions=versions,
        required=required,
        loaded=torch.get("loaded", {}),
        bitsandbytes=bitsandbytes_libraries(),
        extensions=_extensions(probed, versions),
        missing=tuple(each.package for each in extensions() if each.models and not _is_served(each.package, versions)),
        environment=environment(os.environ),
        flash_attention=torch.get("flash_attention"),
        matmul_tf32=torch.get("matmul_tf32"),
    )


def _cuda_error(probed: Mapping[str, Any]) -> str:
    """Return why CUDA does not start; the probe may have hung or died of it."""
    if "torch" not in probed:
        return "torch cannot be imported" if version_of("torch") else ""
    if probed.get("starting"):
        return "starting it does not end, or ends the process"
    error: str = probed["torch"].get("cuda_error", "")
    return error


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables whose values change memory or speed."""
    return {name: value for name, value in variables.items() if variable(name, value) is not None}


def bitsandbytes_libraries(folder: Path | None = None) -> tuple[str, ...] | None:
    """Return the CUDA versions that the installed bitsandbytes has a library for; ``None`` where it is not installed.

    Args:
        folder: Where the package is; found if it is left out.
    """
    if folder is None:
        try:
            folder = Path(str(metadata.distribution("bitsandbytes").locate_file("bitsandbytes")))
        except metadata.PackageNotFoundError:
            return None
    found = (_BITSANDBYTES.match(each.name) for each in sorted(folder.glob("libbitsandbytes_cuda*")))
    return tuple(f"{match['major']}.{match['minor']}" for match in found if match)


def _required() -> dict[str, str]:
    """Return the versions of NVIDIA's libraries and Triton that torch's package asks for."""
    try:
        wanted = metadata.requires("torch") or []
    except metadata.PackageNotFoundError:
        return {}
    matches = (_PINNED.match(each) for each in wanted if "extra ==" not in each)
    return {match["name"]: match["version"] for match in matches if match}


def _is_served(package: str, versions: Mapping[str, str]) -> bool:
    """Return whether a package or the one that serves instead is installed."""
    entry = next(each for each in extensions() if each.package == package)
    return package in versions or entry.either in versions


def _extensions(probed: Mapping[str, Any], versions: Mapping[str, str]) -> tuple[Extension, ...]:
    """Return the installed extensions with what importing them raised; one of them may have ended the probe."""
    errors: dict[str, str] = dict(probed.get("extensions", {}))
    if crashed := probed.get("importing"):
        errors[crashed] = "importing it ends the process"
    known = [each.package for each in extensions() if each.package in versions and each.package in errors]
    return tuple(Extension(package, versions[package], errors[package]) for package in known)
