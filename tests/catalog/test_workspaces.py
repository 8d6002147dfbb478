"""Workspaces of cuBLAS by capability, torch version and environment."""

import pytest

from trainatomy.catalog.versions import (
    cublas_workspace_bytes,
    cublaslt_workspace_bytes,
    workspaces,
    workspaces_per_call,
)

MIB = 2**20


@pytest.mark.parametrize(
    ("capability", "version", "expected"),
    [
        ((7, 0), (1, 10), 0),
        ((9, 0), (1, 13), 4 * MIB),
        ((7, 0), (2, 9), 8519680),
        ((8, 0), (2, 13), 8519680),
        ((9, 0), (2, 9), 32 * MIB),
        ((10, 0), (2, 11), 8519680),
        ((10, 0), (2, 12), 32 * MIB),
        ((12, 0), (2, 13), 32 * MIB),
        ((11, 0), (2, 13), 8519680),
        ((11, 0), (2, 14), 32 * MIB),
    ],
)
def test_default_workspace(capability, version, expected):
    assert cublas_workspace_bytes(capability, version, {}) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (":4096:2:16:8", 8519680),
        (":16:8", 16 * 8 * 1024),
        (":0:0", 0),
        ("4096:8", 32 * MIB),
        ("nonsense", 32 * MIB),
        (":4096:8", 32 * MIB),
    ],
)
def test_configured_workspace(config, expected):
    assert cublas_workspace_bytes((9, 0), (2, 11), {"CUBLAS_WORKSPACE_CONFIG": config}) == expected


def test_the_number_of_pools_was_ignored_before_torch_2():
    env = {"CUBLAS_WORKSPACE_CONFIG": ":4096:2:16:8"}
    assert cublas_workspace_bytes((8, 0), (1, 13), env) == (4096 + 16) * 1024


def test_cublaslt_has_its_own_mebibyte_before_it_shares():
    assert cublaslt_workspace_bytes((9, 0), (2, 11), {}) == MIB  # as in the H200's trace of torch 2.11
    assert cublaslt_workspace_bytes((9, 0), (2, 12), {}) == 0
    assert cublaslt_workspace_bytes((9, 0), (2, 11), {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "1"}) == 0
    assert cublaslt_workspace_bytes((9, 0), (2, 13), {"TORCH_CUBLASLT_UNIFIED_WORKSPACE": "0"}) == MIB
    assert cublaslt_workspace_bytes((9, 0), (2, 11), {"CUBLASLT_WORKSPACE_SIZE": "4096"}) == 4 * MIB
    assert cublaslt_workspace_bytes((9, 0), (2, 8), {}) == 0


def test_workspaces_of_single_calls():
    assert not workspaces_per_call((2, 14), {})
    assert workspaces_per_call((2, 15), {})
    assert not workspaces_per_call((2, 15), {"TORCH_CUBLAS_WORKSPACE_CACHE": "1"})
    assert workspaces((9, 0), (2, 15), {}).cublaslt_bytes == MIB
