"""One thread a process: tests run side by side, and ranks of a test are processes of their own.

Set before anything imports torch or numpy.
"""

import os
import sys
from types import ModuleType

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MKL_NUM_THREADS"] = "1"

import pytest
from hypothesis import settings

# Machines that run tests are shared: an example that is slow for once is no failure.
settings.register_profile("drydock", deadline=None)
settings.load_profile("drydock")


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the marks in this hook too
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start ranks run one after another, in one worker with one pool of ranks.

    Two at once on two cores take many times as long: at every collective each rank waits for all
    others to get their turn.
    """
    for item in items:
        if starts_ranks(getattr(item, "module", None), set()):
            item.add_marker(pytest.mark.xdist_group("ranks"))


def starts_ranks(module: ModuleType | None, seen: set[str]) -> bool:
    """Whether a test module, or one of tests/ that it takes anything from, starts ranks."""
    if module is None or module.__name__ in seen:
        return False
    seen.add(module.__name__)
    if hasattr(module, "run_on_ranks") or hasattr(module, "run_layout"):
        return True
    values = vars(module).values()
    names = {
        v.__name__ if isinstance(v, ModuleType) else getattr(v, "__module__", "") for v in values
    }
    used = [name for name in names if isinstance(name, str) and name.startswith("tests.")]
    return any(starts_ranks(sys.modules.get(name), seen) for name in used)
