"""Arguments of calls as text."""

from __future__ import annotations

import torch

from trainatomy.simulator.calls import text


def test_a_storage_is_described_without_its_bytes() -> None:
    """PyTorch writes one on the host byte by byte, which takes a minute for a batch of images."""
    written = [text(torch.empty(5, device=place).untyped_storage()) for place in ("cpu", "meta")]
    assert (
        written[0] == written[1].replace("cuda", "cpu") == "...\n[torch.storage.UntypedStorage(device=cpu) of size 20]"
    )
