"""The command: torch's message in, the plan of the rank that died out."""

import pytest
from click.testing import CliRunner

from lib.config.run_config import resolve
from lib.config.schema import ParallelConfig
from lib.train.random_tokens import random_tokens
from lib.workflow.shapes import REFERENCES, documents_for, measured_run
from stages.explain_memory import main
from tests.plan.test_remedies import MESSAGE


@pytest.fixture
def config(tmp_path):
    shape = REFERENCES["1.4b"]
    run = measured_run(shape, ParallelConfig(data=2, pipeline=2), "bf16")
    return resolve(run, random_tokens(tmp_path, run, shape.vocab_size, documents_for(shape, 1, 1)))


@pytest.fixture
def files(config, tmp_path):
    (tmp_path / "run_config.json").write_text(config.to_json())
    (tmp_path / "params.yaml").write_text("runtime:\n  recompute: none\n")
    return [f"--params={tmp_path / 'params.yaml'}", f"--run-config={tmp_path / 'run_config.json'}"]


@pytest.mark.parametrize(("rank", "stage"), [(0, 0), (1, 0), (2, 1), (3, 1)])
def test_the_stage_of_the_rank_that_died(files, rank, stage):
    done = CliRunner().invoke(
        main, [*files, "--processes=4", f"--rank={rank}"], input=f"Traceback ...\n{MESSAGE}\n"
    )
    assert done.exit_code == 0, done.output
    for text in (f"stage {stage} needs", "process 4711", "training.micro_batch_size: 4 saves"):
        assert text in done.output
    assert "expandable_segments" in done.output.splitlines()[-1]


@pytest.mark.parametrize("arguments", [["--processes=4", "--rank=4"], ["--processes=3"]])
def test_refusals_are_one_line(files, arguments):
    done = CliRunner().invoke(main, [*files, *arguments], input=MESSAGE)
    assert done.exit_code == 1
    assert done.output.startswith("error: ")


def test_what_is_no_message_of_memory_is_refused(files):
    done = CliRunner().invoke(main, [*files, "--processes=4"], input="Traceback ...\nValueError\n")
    assert done.exit_code == 1
    assert done.output.startswith("error: standard input: says nothing of memory that ran out")
