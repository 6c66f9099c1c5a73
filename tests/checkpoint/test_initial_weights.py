"""Importing weights: transformers' own folders, exact round trips, and everything refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lib.checkpoint.huggingface import to_huggingface
from lib.checkpoint.initial_weights import StoredWeights, write_weights
from lib.checkpoint.weight_sources import read_source
from lib.config.initial_weights import GivenWeights, WeightsRecord
from lib.config.run_config import InitialWeights
from lib.errors import UserError
from lib.layers.attention import attention_backend
from lib.model.gpt import GPTModel, ModelOptions, whole_model
from lib.parallel.groups import ParallelGroups
from lib.parallel.storage import named_parts
from tests.checkpoint.examples import run_config
from tests.checkpoint.test_huggingface import VOCABULARY, gpt2, llama, qwen2, qwen3, theirs, weights
from tests.data.tiny_tokenizer import save_tiny
from tests.stored import fill

NOWHERE = Path("no-tokenizer")
KINDS = {
    "gpt2": gpt2(),
    "llama": llama(),
    "llama tied": llama(tie_embeddings=True),
    "qwen2": qwen2(),
    "qwen3": qwen3(),
}


def their_folder(folder, config, **save):
    """A folder that transformers has written, and its model."""
    torch.manual_seed(5)
    _, fields = to_huggingface(weights(config), config, VOCABULARY)
    model = theirs(fields).eval()
    model.save_pretrained(folder, **save)
    return model


def imported(source, folder, data_tokenizer=NOWHERE):
    read = read_source(source, data_tokenizer)
    write_weights(
        folder,
        read.tensors,
        read.model,
        read.description,
        tokenizer=read.tokenizer,
        tokenizer_fingerprint=read.tokenizer_fingerprint,
    )
    return read


def our_model(folder):
    """Our model with the weights of a weights folder."""
    record = WeightsRecord.load(folder)
    model = GPTModel(
        record.model,
        vocab_size=record.vocab_size,
        padded_vocab_size=record.vocab_size,
        groups=ParallelGroups(),
        options=ModelOptions(attention_backend("auto")),
        part=whole_model(record.model),
    )
    tensors = load_file(folder / "model.safetensors")
    assert tensors.keys() == {name for name, _ in named_parts(model)}
    fill(model, tensors, torch.float32)
    return model.eval()


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("save", [{}, {"max_shard_size": "5KB"}], ids=["one file", "shards"])
def test_their_folder_gives_their_logits(tmp_path, config, save):
    other = their_folder(tmp_path / "theirs", config, **save)
    assert (tmp_path / "theirs" / "model.safetensors.index.json").exists() == bool(save)
    imported(tmp_path / "theirs", tmp_path / "initial")
    tokens = torch.randint(VOCABULARY, (3, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        mine = our_model(tmp_path / "initial")(tokens.T).transpose(0, 1)
        expected = other(tokens).logits
    assert expected.std() > 0.01
    torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)


def test_half_precision_is_read_exactly(tmp_path):
    other = their_folder(tmp_path / "theirs", llama()).bfloat16()
    other.save_pretrained(tmp_path / "theirs")
    read = imported(tmp_path / "theirs", tmp_path / "initial")
    state, _ = to_huggingface(read.tensors, read.model, VOCABULARY)
    for name, value in other.state_dict().items():
        assert torch.equal(state[name], value.float()), name


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_out_and_in_again_is_the_same_bit_for_bit(tmp_path, config):
    ours = weights(config)
    state, fields = to_huggingface(ours, config, VOCABULARY)
    if config.tie_embeddings:
        del state["lm_head.weight"]
    (tmp_path / "out").mkdir()
    save_file(state, tmp_path / "out" / "model.safetensors")
    (tmp_path / "out" / "config.json").write_text(json.dumps(fields))
    imported(tmp_path / "out", tmp_path / "initial")
    record = WeightsRecord.load(tmp_path / "initial")
    assert record.model == config
    again = load_file(tmp_path / "initial" / "model.safetensors")
    assert again.keys() == ours.keys()
    assert all(torch.equal(again[name], ours[name]) for name in ours)
    first = {f.name: f.read_bytes() for f in (tmp_path / "initial").iterdir()}
    imported(tmp_path / "out", tmp_path / "initial")
    assert {f.name: f.read_bytes() for f in (tmp_path / "initial").iterdir()} == first


def give_tokenizer(folder, vocab_size):
    """Puts a tokenizer.json and the id that ends a document into a Hugging Face folder."""
    tokenizer = save_tiny(folder / "tokenizer", vocab_size)
    (folder / "tokenizer" / "tokenizer.json").rename(folder / "tokenizer.json")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": tokenizer.eod_id}))
    return tokenizer


def test_rows_that_no_token_has_are_cut(tmp_path):
    """As Qwen's and others' tables, which are padded beyond their tokenizer."""
    other = their_folder(tmp_path / "theirs", llama())
    tokenizer = give_tokenizer(tmp_path / "theirs", 290)
    read = imported(tmp_path / "theirs", tmp_path / "initial")
    assert read.padding_rows == VOCABULARY - 290
    assert read.end_of_document == "<|endoftext|>"
    record = WeightsRecord.load(tmp_path / "initial")
    assert record.vocab_size == 290
    assert record.tokenizer_fingerprint == tokenizer.fingerprint
    table = load_file(tmp_path / "initial" / "model.safetensors")["output_layer.weight"]
    assert torch.equal(table, other.lm_head.weight[:290])


def test_code_in_the_folder_is_never_run(tmp_path):
    their_folder(tmp_path / "theirs", llama())
    trap = f"import pathlib\npathlib.Path({str(tmp_path / 'ran')!r}).touch()\n"
    for name in ("modeling.py", "__init__.py", "conftest.py"):
        (tmp_path / "theirs" / name).write_text(trap)
    imported(tmp_path / "theirs", tmp_path / "initial")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling.Model"}
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="auto_map"):
        imported(tmp_path / "theirs", tmp_path / "initial")
    assert not (tmp_path / "ran").exists()


def folder_of(path, state, fields, name="model.safetensors"):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(fields))
    save_file({key: value.contiguous() for key, value in state.items()}, path / name)


def index(path, weight_map):
    (path / "model.safetensors").rename(path / "part.safetensors")
    text = json.dumps({"weight_map": weight_map})
    (path / "model.safetensors.index.json").write_text(text)


def foreign_folders(root):
    """Folders that cannot be imported, each with the complaint."""
    state, fields = to_huggingface(weights(llama()), llama(), VOCABULARY)
    names = dict.fromkeys(state, "part.safetensors")
    norm = "model.norm.weight"

    def make(name, **changes):
        folder_of(root / name, {**state, **changes}, fields)
        return root / name

    yield root / "absent", "no such folder"
    (root / "empty").mkdir()
    yield root / "empty", "holds no config.json"
    pickled = make("pickled")
    (pickled / "model.safetensors").unlink()
    yield pickled, "no .safetensors file"
    torch.save(state, pickled / "pytorch_model.bin")
    yield pickled, "is a pickle, which can run any code.*save_pretrained"
    two = make("two")
    (two / "model.safetensors").rename(two / "a.safetensors")
    (two / "b.safetensors").write_bytes((two / "a.safetensors").read_bytes())
    yield two, "has 2 .safetensors files and no model.safetensors.index.json"
    cut = make("cut")
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[:-10])
    yield cut, r"cut/model.safetensors: cannot be read"
    quantised = make("quantised", **{norm: torch.ones(16, dtype=torch.int8)})
    yield quantised, "model.norm.weight is torch.int8.*not quantised"
    yield make("more", extra=torch.zeros(1)), "more: the weights hold extra"
    for name, weight_map, complaint in (
        ("outside", names | {norm: "../part.safetensors"}, "no file of this folder"),
        ("fewer", {k: v for k, v in names.items() if k != norm}, f"than .* says: {norm}"),
        ("missing", names | {norm: "other.safetensors"}, "cannot be read|other tensors than"),
        ("none", [], "has no weight_map"),
    ):
        index(make(name), weight_map)
        yield root / name, complaint
    for name, config, complaint in (
        ("list", [], "config.json: is no JSON object"),
        ("unknown", fields | {"model_type": "mamba"}, "unknown: .*mamba"),
        ("zero", fields | {"rms_norm_eps": 0}, "zero.*eps"),
    ):
        (make(name) / "config.json").write_text(json.dumps(config))
        yield root / name, complaint


def test_what_cannot_be_imported_is_refused(tmp_path):
    for folder, complaint in foreign_folders(tmp_path):
        with pytest.raises(UserError, match=complaint) as caught:
            read_source(folder, NOWHERE)
        assert "\n" not in str(caught.value)


def test_folders_of_ours_of_which_another_was_meant(tmp_path):
    (tmp_path / "state" / "iter_0000002").mkdir(parents=True)
    (tmp_path / "state" / "latest_checkpointed_iteration.txt").write_text("2\n")
    with pytest.raises(UserError, match="name one of them: iter_0000002"):
        read_source(tmp_path / "state", NOWHERE)
    folder_of(tmp_path / "out", *to_huggingface(weights(llama()), llama(), VOCABULARY))
    imported(tmp_path / "out", tmp_path / "initial")
    with pytest.raises(UserError, match="is a weights folder already"):
        read_source(tmp_path / "initial", NOWHERE)


def stored(folder, sha256, model=None):
    """The weights of a folder as a run reads them that was configured for them."""
    initial = InitialWeights(folder=str(folder), sha256=sha256)
    base = run_config(data__vocab_size=VOCABULARY)
    return StoredWeights(base.model_copy(update={"model": model or llama(), "initial": initial}))


def test_a_folder_that_is_not_what_it_was_is_refused(tmp_path):
    """Every file of it, and the checksum that the run configuration names."""
    folder_of(tmp_path / "out", *to_huggingface(weights(llama()), llama(), VOCABULARY))
    folder = tmp_path / "initial"
    imported(tmp_path / "out", folder)
    sha256 = WeightsRecord.load(folder).files["model.safetensors"].sha256
    ours, read = weights(llama()), stored(folder, sha256)
    assert all(torch.equal(read.rows(name), ours[name]) for name in ours)
    with pytest.raises(UserError, match=r"says sha256 .*initial_weights: .*@") as caught:
        stored(folder, "ab" * 32)
    assert str(folder) in str(caught.value)
    with pytest.raises(UserError, match=r"layers.0.self_attention.*instead of"):
        stored(folder, sha256, llama(num_query_groups=4))
    sound = {file.name: file.read_bytes() for file in folder.iterdir()}
    data = bytearray(sound["model.safetensors"])
    data[-3] ^= 1
    record = sound["weights.json"]
    faults = [
        ("model.safetensors", bytes(data), "model.safetensors has sha256"),
        ("model.safetensors", sound["model.safetensors"][:-1], "bytes instead of"),
        ("weights.json", b"{", "weights.json: the text"),
        ("weights.json", record.replace(b'"format": 1', b'"format": 2'), "weights.json: format"),
        ("weights.json", None, "weights.json: no such file"),
    ]
    for file, content, complaint in faults:
        (folder / file).unlink()
        if content is not None:
            (folder / file).write_bytes(content)
        with pytest.raises(UserError, match=complaint) as caught:
            stored(folder, sha256)
        assert "\n" not in str(caught.value)
        (folder / file).write_bytes(sound[file])
    with pytest.raises(UserError, match=r"nowhere/weights.json: no such file; import"):
        GivenWeights.read(f"nowhere@{'0' * 16}")
