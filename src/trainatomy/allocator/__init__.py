"""Simulated CUDA caching allocator of PyTorch: from requests to block sizes, peaks and fragmentation."""

from trainatomy.allocator.outofmemory import OutOfMemory
from trainatomy.allocator.replay import Replay, replay
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.allocator.simulated import CachingAllocator
from trainatomy.allocator.snapshot import BlockView, SegmentView

__all__ = ["AllocatorSettings", "BlockView", "CachingAllocator", "OutOfMemory", "Replay", "SegmentView", "replay"]
