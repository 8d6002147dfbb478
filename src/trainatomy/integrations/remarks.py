"""What a reader must know of a watched training's figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainatomy.units import human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from trainatomy.integrations.reading import Utilization

BORROWED = "the memory history was already being recorded; it was read and left as it is"
OVERFLOWN = "one step makes more allocations than the memory history keeps: no components"
INCOMPLETE = (
    "the memory history that was already being recorded does not reach back to the beginning of the watch: "
    "no components; record with more max_entries, or leave the recording to trainatomy"
)


def remarks(before: Utilization, after: Utilization, *, is_complete: bool, is_borrowed: bool) -> Iterator[str]:
    """``before`` and ``after`` the watch; ``is_complete``: the history holds every allocation of its window;
    ``is_borrowed``: it is the user's."""
    if is_borrowed:
        yield BORROWED if is_complete else INCOMPLETE
    elif not is_complete:
        yield OVERFLOWN
    if cached := before.reserved_bytes - before.allocated_bytes:
        yield (
            f"{human_bytes(cached)} were reserved but not allocated when the watch began; "
            "they count as reserved at the peak"
        )
    if after.unlisted_bytes and after.context_bytes is not None:
        yield _unlisted(after, after.unlisted_bytes, after.context_bytes)


def _unlisted(after: Utilization, count: int, context: int) -> str:
    """What the card holds for no process that NVML lists: a little is this process's own, because another's context
    would take far more; more than that may be anybody's."""
    if count < context / 2:
        return (
            f"the driver counts {human_bytes(count)} for the card but for no process; they belong to the context, "
            "where `trainatomy measure` and a prediction have them, and are not in this bill"
        )
    hidden = "; processes outside of this container are not listed" if after.can_hide else ""
    return f"the card holds {human_bytes(count)} for no process that NVML lists{hidden}; they are not in this bill"
