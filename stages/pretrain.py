"""Stage: trains the model of the run configuration and publishes it.

This module runs twice. A person (or DVC) starts the launcher, which chooses device and processes
and starts torchrun; torchrun starts this module again as the workers, which train.
"""

import os
import sys
from pathlib import Path

from lib.cli import stage_command
from lib.config.launch_plan import choose_device, process_count
from lib.config.operation import LaunchConfig, RuntimeConfig
from lib.config.params_file import read_params
from lib.config.project import stage_code, state_root
from lib.config.run_config import RunConfig
from lib.console import say, warn
from lib.errors import InvalidParams
from lib.layers.attention_limits import PACKAGE_MODULES
from lib.train.current_config import require_current
from lib.train.hardware import Machine, cuda_devices, installed
from lib.train.launch import LaunchOptions, launch
from lib.train.machine_rules import machine_findings
from lib.train.nodes import find_nodes
from lib.train.worker import is_worker, worker_session

RUN_CONFIG = Path("outputs/run_config.json")
DATA_TOKENIZER = Path("data/tokenizer")
EXPLAINER = "stages.explain_memory"  # started, not imported: what it says changes no training


@stage_command
def main(params: Path) -> None:
    """Trains the model, from its last checkpoint if there is one, and publishes it.

    Ctrl-C or SIGTERM saves the state first; the same command, run again, continues. A run that is
    finished continues when training.train_iters grows or data.phases gets another phase. Any other
    change of what is trained starts afresh, beside the old state. On several nodes, start it on
    each (docs/clusters.md).

    \b
    Reads   outputs/run_config.json, data/tokens, data/tokenizer
            the pairs of data.imported
            params.yaml (sections launch and runtime)
    Writes  state/FINGERPRINT/   checkpoints, history and log while training
            model/               weights, run configuration, tokenizer, record,
                                 log
            results/train.csv, validation.csv, train.json
    """  # noqa: D301  (click wants the character)
    params_file = read_params(params)
    launch_config = params_file.section("launch", LaunchConfig)
    runtime = params_file.section("runtime", RuntimeConfig)
    if is_worker():
        train_as_worker(params, launch_config, runtime)
        return
    config = RunConfig.load(RUN_CONFIG)
    require_current(config, params_file, str(RUN_CONFIG))
    gpus = cuda_devices()
    nodes = find_nodes(launch_config, os.environ)
    here = Machine(gpus, installed(PACKAGE_MODULES), nodes=nodes.count)
    refused, advice = machine_findings(config, launch_config, runtime, here)
    if refused:
        raise InvalidParams(params_file.located(refused))
    for each in params_file.located(advice):
        warn(str(each))
    device = choose_device(launch_config, len(gpus))
    processes = process_count(config, launch_config, len(gpus), nodes.count)
    if nodes.count > 1 and nodes.rank == 0:
        say(f"training on {nodes.count} nodes x {processes} processes")
    if device == "cuda" and processes < len(gpus):
        say(f"training on {processes} of {len(gpus)} GPUs, as parallel and the batch sizes allow")
    options = LaunchOptions(
        device=device,
        processes=processes,
        threads=launch_config.threads,
        stop_timeout_s=launch_config.stop_timeout_s,
        log_dir=state_root(),
        nodes=nodes,
        explainer=(EXPLAINER, f"--params={params}", f"--run-config={RUN_CONFIG}"),
    )
    sys.exit(launch("stages.pretrain", ["--params", str(params)], options))


def train_as_worker(params: Path, launch_config: LaunchConfig, runtime: RuntimeConfig) -> None:
    """Runs one worker under torchrun."""
    with worker_session() as stop:
        from lib.train.pretrain import PretrainInputs, pretrain  # imports torch: seconds

        inputs = PretrainInputs(
            params=params,
            run_config=RUN_CONFIG,
            launch=launch_config,
            runtime=runtime,
            code=stage_code(Path("dvc.yaml"), "pretrain"),
            tokenizer=DATA_TOKENIZER,
            state_root=state_root(),
            model=Path("model"),
            results=Path("results"),
        )
        pretrain(inputs, stop)


if __name__ == "__main__":
    main()
