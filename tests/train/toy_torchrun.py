"""A stand-in for torchrun, for tests of what is around it: it starts without importing torch.

It does what the launcher relies on: starts the workers, waits for all, and ends the others when
one fails. ``test_launch.py`` and ``test_launch_nodes.py`` keep the real one where it matters.
"""

import argparse
import os
import subprocess
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc-per-node", type=int)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--module")
    parser.add_argument("--standalone", action="store_true")
    for taken in ("--signals-to-handle", "--local-addr", "--master-addr", "--master-port"):
        parser.add_argument(taken)
    parser.add_argument("arguments", nargs=argparse.REMAINDER)  # the worker's
    options = parser.parse_args()
    size = options.nproc_per_node
    workers = []
    for local in range(size):
        ranks = {"RANK": options.node_rank * size + local, "LOCAL_RANK": local}
        ranks |= {"GROUP_RANK": options.node_rank, "WORLD_SIZE": options.nnodes * size}
        environment = os.environ | {name: str(number) for name, number in ranks.items()}
        command = [sys.executable, "-m", options.module, *options.arguments]
        workers.append(subprocess.Popen(command, env=environment))
    while any(worker.poll() is None for worker in workers):
        if any(worker.poll() for worker in workers):
            for worker in workers:
                worker.terminate()
        time.sleep(0.02)
    sys.exit(any(worker.returncode for worker in workers))


if __name__ == "__main__":
    main()
