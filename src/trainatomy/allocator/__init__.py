"""Simulated CUDA caching allocator of PyTorch: from requests to block sizes, peaks and fragmentation."""

from trainatomy.allocator.blocks import BlockView, SegmentView
from trainatomy.allocator.replay import Replay, replay
from trainatomy.allocator.settings import AllocatorSettings
from trainatomy.allocator.simulated import CachingAllocator, OutOfMemory

__all__ = ["AllocatorSettings", "BlockView", "CachingAllocator", "OutOfMemory", "Replay", "SegmentView", "replay"]
