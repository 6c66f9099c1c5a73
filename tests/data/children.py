"""The processes that code under test has started in this one."""

import multiprocessing
from multiprocessing.process import BaseProcess


def started_processes() -> list[BaseProcess]:
    """Living child processes, without the ranks that tests/distributed.py keeps for later."""
    children = multiprocessing.active_children()
    return [child for child in children if not child.name.startswith("rank-")]
