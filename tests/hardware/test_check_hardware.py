"""The command on a machine that is broken in three ways; and the layouts of a smoke run."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from lib.config.params_file import read_params
from lib.config.run_config import Params
from lib.hardware.layouts import differing, layouts_of
from lib.train.comparison import Difference

ROOT = Path(__file__).resolve().parents[2]


def test_a_broken_machine_is_told_what_is_wrong_and_what_to_try(tmp_path):
    """Another program at the port, an interface that is not there, a GPU too few."""
    record = tmp_path / "hardware.json"
    variables = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "nope0", "CUDA_VISIBLE_DEVICES": ""}
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = str(door.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "stages.check_hardware", "--gpus", "1", "--json", str(record)],
            cwd=ROOT,
            env=os.environ | variables | {"MASTER_PORT": port, "MASTER_ADDR": "localhost"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 1, done.stderr
    assert done.stderr.startswith("error: 4 failed: number of GPUs, GLOO_SOCKET_IFNAME, MASTER_")
    assert "Traceback" not in done.stdout + done.stderr
    findings = {f["name"]: f for f in json.loads(record.read_text())["findings"]}
    failed = {name: f for name, f in findings.items() if f["status"] == "failed"}
    assert len(failed) == 4
    assert all(f["meaning"] and f["remedy"] for f in failed.values())
    assert all(f"Try: {f['remedy']}" in done.stdout for f in failed.values())
    (gloo,) = [f for name, f in failed.items() if name.startswith("gloo")]
    assert "Unable to find address for: nope0" in gloo["seen"]
    assert findings["attention: sdpa"]["status"] == "ok", "what does not depend on it is checked"
    ceilings = json.loads(record.read_text())["ceilings"]
    assert ceilings["product_tflops"] > 0
    assert ceilings["link_gb_per_s"] is None


def test_layouts_grow_with_the_machine():
    params = Params.from_file(read_params(ROOT / "params.yaml"))
    params = replace(params, model=params.model.model_copy(update={"num_layers": 4}))
    assert layouts_of(params, 1) == []
    names = [layout.name for layout in layouts_of(params, 2)]
    assert names[:4] == ["tp2 pp1 dp1", "tp2+sp pp1 dp1", "tp1 pp2 dp1", "tp1 pp1 dp2"]
    sizes = [{layout.processes for layout in layouts_of(params, n)} for n in (2, 4, 8)]
    assert sizes == [{2}, {2, 4}, {2, 4, 8}]


def test_a_layout_that_differs_is_named():
    near, far = (Difference(x, x, (x, "a"), (x, "b")) for x in (1e-12, 1e-6))
    odd = Difference(float("nan"), 0.0, (0.0, "a"), (0.0, "b"))
    assert differing([("one", near), ("two", far), ("three", odd)]) == ["two", "three"]
