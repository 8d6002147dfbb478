"""The twin of PyTorch's CUDA caching allocator: requests in, block sizes, peaks and fragmentation out."""

from trainatomy.allocator.outofmemory import OutOfMemory
from trainatomy.allocator.replay import Replay, replay
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.allocator.simulated import CachingAllocator
from trainatomy.allocator.snapshot import BlockView, SegmentView

__all__ = ["AllocatorSettings", "BlockView", "CachingAllocator", "OutOfMemory", "Replay", "SegmentView", "replay"]
