"""A GPU's queue that is made up: work takes as long as it says, and the host waits when told."""

from types import SimpleNamespace

import torch


class FakeGpu:
    """Takes the place of what torch.cuda is asked for while something is timed.

    Attributes:
        now: seconds of work in the queue so far.
        waits: how often the host waited for all of it.
    """

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.waits = 0
        gpu = self

        class Event:
            def __init__(self, *, enable_timing):
                assert enable_timing

            def record(self):
                self.moment = gpu.now
                self.waits = gpu.waits

            def elapsed_time(self, later):
                assert gpu.waits > later.waits, "read before the GPU was waited for"
                return 1e3 * (later.moment - self.moment)

        def synchronize(_device=None):
            self.waits += 1

        properties = SimpleNamespace(L2_cache_size=10)
        for name, fake in {
            "Event": Event,
            "synchronize": synchronize,
            "reset_peak_memory_stats": lambda _device: None,
            "max_memory_allocated": lambda _device: 7,
            "get_device_properties": lambda _device: properties,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def work(self, seconds):
        self.now += seconds
