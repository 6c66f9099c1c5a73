"""One thread a process: tests run side by side, and ranks of a test are processes of their own.

Set before anything imports torch or numpy.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import pytest
from hypothesis import settings

# Machines that run tests are shared: an example that is slow for once is no failure.
settings.register_profile("drydock", deadline=None)
settings.load_profile("drydock")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start ranks run one after another, in one worker with one pool of ranks.

    Two at once on two cores take many times as long: at every collective each rank waits for all
    others to get their turn.
    """
    for item in items:
        module = getattr(item, "module", None)
        if hasattr(module, "run_on_ranks") or hasattr(module, "run_layout"):
            item.add_marker(pytest.mark.xdist_group("ranks"))
