"""The command: what it writes passes the check of this project, and nothing is overwritten."""

import io
import json
import sys
from pathlib import Path

import pytest

from lib.config.params_file import parse_params, read_params
from lib.errors import UserError
from stages.import_megatron_args import main
from stages.validate_config import check_schema

ROOT = Path(__file__).parents[2]
LLAMA = """
#!/bin/bash
GPUS=8; NODES=${NODES:-1}
SIZES=(--num-layers 32 --hidden-size 4096 --num-attention-heads 32
  --group-query-attention --num-query-groups 8   # llama 3
  --swiglu --ffn-hidden-size 14336)
STYLE=" --position-embedding-type rope --rotary-base 500000 --normalization RMSNorm \\
  --disable-bias-linear --untie-embeddings-and-output-weights \\
  --attention-dropout 0 --hidden-dropout 0.0"
torchrun --nproc_per_node $GPUS --nnodes $NODES pretrain_gpt.py ${SIZES[@]} $STYLE \\
  --seq-length $((8*1024)) --max-position-embeddings 8192 --bf16 --use-flash-attn \\
  --tensor-model-parallel-size 4 --sequence-parallel --use-distributed-optimizer \\
  --micro-batch-size 1 --global-batch-size 128 --train-samples 1_000_000 \\
  --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction .01 \\
  --data-path 2 /d/web_text_document 1 /d/code_text_document --split 99,1,0 \\
  --tokenizer-type Llama2Tokenizer --tokenizer-model /d/tokenizer.model \\
  --transformer-impl transformer_engine --save "$OUT" --hazard-lights
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("params.yaml").write_text((ROOT / "params.yaml").read_text())
    Path("train.sh").write_text(LLAMA)
    return tmp_path


def run(script: str = "train.sh", **options: object) -> None:
    """The command without its guard, which would tie this process to its parent."""
    given = {"params": Path("params.yaml"), "script": script, "output": None}
    given |= {"overwrite": False, "given": (), "as_json": False}
    main.callback.__wrapped__(**{**given, **options})


def test_the_file_passes_the_check_and_keeps_its_comments(project: Path) -> None:
    before = Path("params.yaml").read_text()
    run(output=Path("llama.yaml"))
    assert Path("params.yaml").read_text() == before
    new = read_params(Path("llama.yaml"))
    check_schema(new)
    assert new.plain("model", "num_query_groups") == 8
    assert new.plain("training", "seq_length") == 8192
    assert new.plain("parallel", "data") == 2
    assert new.plain("training", "train_samples") == 1_000_000 // 128 * 128
    assert new.plain("schedule", "warmup_samples") == 10_000
    assert new.plain("data", "blend") == {"web": 2, "code": 1}
    assert new.plain("evaluate", "split") == "valid"
    comments = [line.partition(" #")[2] for line in before.splitlines() if " #" in line]
    after = Path("llama.yaml").read_text()
    assert [comment for comment in comments if comment not in after] == []


def test_the_lists_say_what_became_of_each_flag(project: Path, capsys) -> None:
    run(output=Path("llama.yaml"))
    said = capsys.readouterr().out
    for line in (
        "--disable-bias-linear -> model.bias: false",
        "optimizer.beta2: 0.999, was 0.95  (Megatron's default of --adam-beta2)",
        "--use-flash-attn: now --attention-backend flash",
        "--transformer-impl transformer_engine: TransformerEngine is not used",
        "unknown flags (1):\n  --hazard-lights",
        "stages.describe_tokens /d/web_text_document",
        "wrote llama.yaml",
    ):
        assert line in said
    assert "ANOTHER ONE" not in said


def test_an_existing_file_is_kept_unless_told(project: Path) -> None:
    with pytest.raises(UserError, match="is there already"):
        run(output=Path("params.yaml"))
    run(output=Path("params.yaml"), overwrite=True)
    assert read_params(Path("params.yaml")).plain("model", "num_layers") == 32


def test_without_output_the_text_is_a_parameter_file(project: Path, capsys) -> None:
    run()
    text = capsys.readouterr().out
    check_schema(parse_params(text, Path("said")))
    assert text.startswith("# ")
    assert {path.name for path in project.iterdir()} == {"params.yaml", "train.sh"}


def test_sums_that_do_not_add_up_write_nothing(project: Path, capsys) -> None:
    with pytest.raises(UserError) as caught:
        run(output=Path("new.yaml"), given=("NODES=3",))
    # 24 processes are 6 copies: the batch of 128 does not divide.
    assert "training.global_batch_size = 128" in str(caught.value)
    assert "parallel.data = 6" in str(caught.value)
    assert not Path("new.yaml").exists()
    assert "mapped" in capsys.readouterr().out


def test_json_tells_all_of_it(project: Path, capsys) -> None:
    run(as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is True
    assert told["unknown"] == {"--hazard-lights": []}
    check_schema(parse_params(told["params"], Path("told")))
    with pytest.raises(SystemExit):
        run(as_json=True, given=("GPUS=8", "NODES=3"), output=Path("new.yaml"))
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert told["problems"][0]["field"] == "training.global_batch_size"
    assert not Path("new.yaml").exists()


def test_standard_input_is_a_script(project: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(LLAMA.replace("--lr 3e-4", "--lr 1e-4")))
    run("-", output=Path("new.yaml"))
    assert read_params(Path("new.yaml")).plain("optimizer", "lr") == 1e-4


def test_a_file_beside_the_script_is_read_in(project: Path) -> None:
    Path("sub").mkdir()
    Path("sub/sizes.sh").write_text(LLAMA.partition("torchrun")[0].replace("32 --", "16 --", 1))
    Path("sub/train.sh").write_text("source ./sizes.sh\ntorchrun" + LLAMA.partition("torchrun")[2])
    run("sub/train.sh", output=Path("new.yaml"))
    assert read_params(Path("new.yaml")).plain("model", "num_layers") == 16


def test_what_transformers_lacks_is_not_to_be_exported(project: Path, capsys) -> None:
    Path("train.sh").write_text(LLAMA.replace("--normalization RMSNorm", ""))
    run(output=Path("new.yaml"))
    assert read_params(Path("new.yaml")).plain("export", "format") == "none"
    assert "export.format: none" in capsys.readouterr().out


def test_mistakes_of_the_command_line(project: Path) -> None:
    with pytest.raises(UserError, match="no such file"):
        run("missing.sh")
    with pytest.raises(UserError, match="NAME=VALUE"):
        run(given=("NODES",))
