"""Workspaces of cuBLAS and cuBLASLt in PyTorch's caching allocator, by GPU, torch version and environment.

Source: aten/src/ATen/cuda/CublasHandlePool.cpp (parseChosenWorkspaceSize, parseCUDABlasLtWorkspaceSize,
getCUDABlasLtWorkspace); ``versions.yaml`` lists the releases in which a rule changed, with the pull request of each.
ROCm is not covered.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trainatomy.catalog.versions import Version, behaviour

Environment = Mapping[str, str]

_CUBLASLT_DEFAULT_KIB = 1024


@dataclass(frozen=True, slots=True)
class Workspaces:
    """Workspaces that one (thread, stream) allocates at its first matrix product.

    Attributes:
        cublas_bytes: cuBLAS' workspace.
        cublaslt_bytes: cuBLASLt's own; 0 where it shares cuBLAS'.
        per_call: Allocated for each call and freed after it, not kept.
    """

    cublas_bytes: int
    cublaslt_bytes: int
    per_call: bool


def workspaces(capability: tuple[int, int], torch_version: Version, env: Environment | None = None) -> Workspaces:
    """Return the workspaces of one (thread, stream); by default those that the process's environment asks for."""
    env = os.environ if env is None else env  # not as a default: datasets binds os.environ to another object
    return Workspaces(
        cublas_workspace_bytes(capability, torch_version, env),
        cublaslt_workspace_bytes(capability, torch_version, env),
        workspaces_per_call(torch_version, env),
    )


def cublas_workspace_bytes(capability: tuple[int, int], torch_version: Version, env: Environment) -> int:
    """Return the bytes of cuBLAS' workspace: ``CUBLAS_WORKSPACE_CONFIG``, else the default of the GPU.

    A configuration such as ":4096:2:16:8" is the sum of size (KiB) x count; one that does not parse gives the default,
    as in PyTorch.  0 before torch 1.13, when cuBLAS allocated for itself.
    """
    rule = behaviour("cublas_workspace", torch_version)
    by_capability = rule.get("by_capability", {})
    major, minor = capability
    default = int(by_capability.get(f"{major}.{minor}", by_capability.get(str(major), rule["default_bytes"])))
    pools = re.findall(r":([0-9]+):([0-9]+)", env.get("CUBLAS_WORKSPACE_CONFIG", ""))
    if not default or not pools:
        return default
    counts_pools = behaviour("cublas_workspace_config_counts_pools", torch_version)
    return sum(int(size) * 1024 * (int(count) if counts_pools else 1) for size, count in pools)


def cublaslt_workspace_bytes(capability: tuple[int, int], torch_version: Version, env: Environment) -> int:
    """Return the bytes of cuBLASLt's own workspace; 0 where it shares cuBLAS' or keeps none (before torch 2.9)."""
    by_default = behaviour("cublaslt_shares_the_workspace_of_cublas", torch_version)
    shared = _switch(env, "TORCH_CUBLASLT_UNIFIED_WORKSPACE", by_default)
    if workspaces_per_call(torch_version, env):
        shared = False
    elif not behaviour("cublaslt_workspace_is_kept", torch_version):
        return 0
    if shared and cublas_workspace_bytes(capability, torch_version, env):
        return 0
    size = re.match(r"\s*[+-]?[0-9]+", env.get("CUBLASLT_WORKSPACE_SIZE", ""))
    return int(size.group() if size else _CUBLASLT_DEFAULT_KIB) * 1024


def workspaces_per_call(torch_version: Version, env: Environment) -> bool:
    """Return whether each call allocates and frees its workspace instead of keeping it for the (handle, stream)."""
    per_call = behaviour("workspaces_are_taken_per_call", torch_version)
    return per_call and not _switch(env, "TORCH_CUBLAS_WORKSPACE_CACHE", False)


def _switch(env: Mapping[str, str], name: str, default: bool) -> bool:
    """Read an environment variable as c10::utils::check_env reads it: "1" and "0" count, anything else is ignored."""
    return {"1": True, "0": False}.get(env.get(name, ""), default)
