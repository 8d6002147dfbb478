"""Stacks of allocations, short enough to keep one for each: the few innermost frames that say something."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

FRAMES_KEPT = 8
NAME_LENGTH = 110

SILENT_PLACES = ("torch/nn/modules/module.py", "torch/utils/_contextlib.py", "torch/_ops.py", "torch/_compile.py")
"""Python files whose frames only pass a call on."""

SILENT_NAMES = (
    "c10::cuda::",
    "c10::StorageImpl",
    "c10::Dispatcher",
    "c10::impl::",
    "c10::detail::",
    "c10::intrusive_ptr",
    "at::_ops::",
    "at::detail::",
    "at::empty",
    "at::native::empty",
    "at::(anonymous namespace)::wrapper_",
    "torch::unwind",
    "torch::CapturedTraceback",
    "torch::cuda::gather",
    "void c10::",
    "std::",
    "_Py",
    "Py",
    "_start",
    "__libc",
    "??",
)
"""Beginnings of C++ names that every allocation shares: the allocator, the dispatcher, the interpreter."""


def shorten(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost telling frames, ``inner < outer < ...``; empty without frames.

    Python frames read ``folder/file.py:line function``, C++ frames are their name alone.
    """
    told = (_describe(str(frame["filename"]), int(frame["line"]), str(frame["name"])) for frame in frames)
    kept: list[str] = []
    for text in told:
        if text and (not kept or kept[-1] != text):
            kept.append(text)
        if len(kept) == FRAMES_KEPT:
            break
    return " < ".join(kept)


def _describe(filename: str, line: int, name: str) -> str:
    if filename.endswith(".py"):
        if filename.endswith(SILENT_PLACES):
            return ""
        return f"{'/'.join(filename.split('/')[-2:])}:{line} {name}"
    return "" if name.startswith(SILENT_NAMES) else name[:NAME_LENGTH]
