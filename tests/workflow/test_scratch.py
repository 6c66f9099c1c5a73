"""The smoke command's own mistakes: an unknown preset ends in one line."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_unknown_preset_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "stages.run_smoke", "--preset", "smoek"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: smoek: no such preset in params; did you mean smoke?")
    assert done.stderr.count("\n") == 1
