"""Multi-rank tests run their functions through this one; see there."""

from lib.train.local_ranks import run_on_ranks

__all__ = ["run_on_ranks"]
