"""One worker's life on a rank of a test: pretraining, on the process group that is there."""

import contextlib
import errno
import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystem

from lib.config.operation import LaunchConfig, RuntimeConfig
from lib.errors import UserError
from lib.train.pretrain import PretrainInputs, pretrain
from lib.train.worker import Stopped

CREATE_STREAM = "torch.distributed.checkpoint.filesystem.FileSystem.create_stream"


@dataclass
class Life:
    """What happens to a worker.

    Attributes:
        stop_after: steps after which it is asked to stop.
        edit_after: steps after which a file gets a text: steps, path, text.
        full_disk: a rank, and the name of a checkpoint folder that it cannot write into.
        threads: CPU threads.
        launch: changes of section ``launch``.
        runtime: changes of section ``runtime``.
    """

    stop_after: int | None = None
    edit_after: tuple[int, str, str] | None = None
    full_disk: tuple[int, str] | None = None
    threads: int = 1
    launch: dict[str, object] = field(default_factory=dict)
    runtime: dict[str, object] = field(default_factory=dict)


class Stop:
    """A stop flag that is set after some steps of this life; the loop looks once before each."""

    def __init__(self, life):
        self.life = life
        self.steps = -1

    @property
    def requested(self):
        self.steps += 1
        if self.life.edit_after is not None and self.steps == self.life.edit_after[0]:
            Path(self.life.edit_after[1]).write_text(self.life.edit_after[2])
        return self.life.stop_after is not None and self.steps >= self.life.stop_after


def live(folder, life):
    """Trains in a folder as ``stages.pretrain`` does; gives how it ended and what was said."""
    inputs = PretrainInputs(
        params=Path("params.yaml"),
        run_config=Path("outputs/run_config.json"),
        launch=LaunchConfig(**life.launch),
        runtime=RuntimeConfig(**life.runtime),
        code=(Path("lib"),),
        tokenizer=Path("data/tokenizer"),
        state_root=Path("state"),
        model=Path("model"),
        results=Path("results"),
    )
    said, ending, message = io.StringIO(), "finished", ""
    torch.set_num_threads(life.threads)
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(folder))
        stack.enter_context(contextlib.redirect_stdout(said))
        stack.enter_context(contextlib.redirect_stderr(said))
        stack.enter_context(mock.patch.dict(os.environ, DRYDOCK_DEVICE="cpu"))
        # The group is the test's: it was made before and is taken down after.
        start = mock.Mock(return_value=torch.device("cpu"))
        stack.enter_context(mock.patch("lib.train.pretrain.start_process_group", start))
        stack.enter_context(mock.patch("lib.train.pretrain.dist.destroy_process_group"))
        if life.full_disk is not None and life.full_disk[0] == dist.get_rank():
            stack.enter_context(mock.patch(CREATE_STREAM, unable(life.full_disk[1])))
        try:
            pretrain(inputs, Stop(life))
        except Stopped as stopped:
            ending, message = "stopped", str(stopped)
        except UserError as error:
            ending, message = "refused", str(error)
    torch.set_num_threads(1)
    return ending, message, said.getvalue()


def unable(name):
    """Opening files, but not those of the named folder."""
    create = FileSystem.create_stream

    def create_stream(self, path, mode):
        if name in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return create(self, path, mode)

    return create_stream
