"""The settings of PyTorch's caching allocator, as text (``PYTORCH_ALLOC_CONF``); here only their form is checked.

Names: c10/core/AllocatorConfig.h and c10/cuda/CUDAAllocatorConfig.h, torch 2.9-2.13.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from trainatomy.workload.nearest import suggestion

KNOWN = (
    "backend",
    "expandable_segments",
    "garbage_collection_threshold",
    "graph_capture_record_stream_reuse",
    "max_non_split_rounding_mb",
    "max_split_size_mb",
    "per_process_memory_fraction",
    "pinned_background_threads",
    "pinned_max_register_threads",
    "pinned_num_register_threads",
    "pinned_reserve_segment_size_mb",
    "pinned_use_cuda_host_register",
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "roundup_power2_divisions",
    "throw_on_cudamalloc_oom",
)
_OPTION = re.compile(r"\s*(\w+)\s*:\s*(\[[^\]]*\]|[^,\[\]]+?)\s*")


def _check(text: str) -> str:
    for option in filter(None, re.split(r",(?![^\[]*\])", text)):
        found = _OPTION.fullmatch(option)
        if found is None:
            message = 'must look like "expandable_segments:True,max_split_size_mb:128"; found {option}'
            raise PydanticCustomError("allocator", message, {"option": repr(option)})
        if found[1] not in KNOWN:
            values = {"name": found[1], "hint": suggestion(found[1], KNOWN)}
            raise PydanticCustomError("allocator", "unknown setting {name}{hint}", values)
        if found[1] == "backend" and found[2] != "native":
            raise PydanticCustomError("allocator", "only PyTorch's own (native) allocator is simulated")
    return text


AllocatorOptions = Annotated[str, AfterValidator(_check)]
