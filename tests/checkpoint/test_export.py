"""Exported folders in the hands of transformers: same logits, same ids; whole or not at all."""

import errno
import json
from unittest import mock

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from lib.checkpoint import export as export_module
from lib.checkpoint.export import plan_shards
from lib.checkpoint.shapes import parameter_shapes
from lib.data.options import TokenizerOptions
from lib.data.sentencepiece_model import to_tokenizer
from lib.data.tokenizer import TextTokenizer, describe_tokenizer
from lib.data.tokenizer_sources import from_tokenizer_json, take_tokenizer
from lib.errors import UserError
from tests.checkpoint.export_models import COMMIT, FINGERPRINT, configuration, contents, publish
from tests.checkpoint.export_models import export as export_folder
from tests.checkpoint.test_huggingface import VOCABULARY, gpt2, llama, qwen2, qwen3
from tests.checkpoint.test_huggingface_parity import close, ours, tokens
from tests.data.tiny_tokenizer import EOD, gpt2_files, sentencepiece_model, train
from tests.stored import values_of

MODELS = {"gpt2": gpt2(), "llama": llama(), "qwen2": qwen2(), "qwen3": qwen3()}
TIED = {"llama tied": llama(tie_embeddings=True)}


@pytest.fixture(scope="module")
def tokenizer():
    return train(vocab_size=VOCABULARY)


def tensors_of(model):
    """The parameters of one of our models, without padding rows."""
    whole = values_of(model)
    tables = ("embedding.word_embeddings.weight", "output_layer.weight")
    return {name: each[:VOCABULARY] if name in tables else each for name, each in whole.items()}


@pytest.fixture(scope="module")
def published(tmp_path_factory, tokenizer):
    """Published models by family, and ours in memory."""
    made = {}
    for name, section in (MODELS | TIED).items():
        folder, model = tmp_path_factory.mktemp("published"), ours(section)
        config = configuration(section, tokenizer)
        made[name] = publish(folder, config, tensors_of(model), tokenizer), model.eval()
    return made


def load(folder, **options):
    model, report = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not any(report.values()), report
    return model.eval()


def logits_of(model):
    inputs, _ = tokens()
    with torch.no_grad():
        return model(inputs.T)[..., :VOCABULARY].transpose(0, 1)


def their_logits(model):
    inputs, _ = tokens()
    with torch.no_grad():
        return model(inputs).logits


@pytest.mark.parametrize("name", MODELS | TIED)
def test_transformers_computes_the_same(published, tmp_path, name, tokenizer):
    folder, model = published[name]
    line = export_folder(folder, tmp_path / "hf")
    assert line.endswith("MB in fp32, 1 file of weights")
    assert set(contents(tmp_path / "hf")) == {
        "README.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    other = load(tmp_path / "hf")
    assert other.config.model_type == name.split()[0]
    assert other.dtype == torch.float32
    found = their_logits(other)
    assert found.shape[-1] == VOCABULARY
    close(logits_of(model), found)
    assert other.generation_config.eos_token_id == other.config.eos_token_id == tokenizer.eod_id
    start = torch.tensor([[tokenizer.eod_id]])
    written = other.generate(start, max_new_tokens=3, do_sample=False, use_cache=False)[0, 1:]
    with torch.no_grad():
        assert written[0] == model(start)[0, 0, :VOCABULARY].argmax()


def test_shards(published, tmp_path):
    """Files of at most 5 kB, but for tensors that are larger; together the same model."""
    folder, model = published["qwen3"]
    export_folder(folder, tmp_path / "hf", max_shard_gigabytes=5e-6)
    files = contents(tmp_path / "hf")
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    assert len(shards) > 4
    assert shards[1] == f"model-00002-of-{len(shards):05d}.safetensors"
    index = json.loads(files["model.safetensors.index.json"])
    assert set(index["weight_map"].values()) == set(shards)
    total = sum(each.numel() * 4 for each in tensors_of(model).values())
    assert index["metadata"]["total_size"] == total
    close(logits_of(model), their_logits(load(tmp_path / "hf")))

    export_folder(folder, tmp_path / "hf")
    assert "model.safetensors" in contents(tmp_path / "hf"), "an export replaces an export"
    assert not [name for name in contents(tmp_path / "hf") if "-of-" in name or "index" in name]


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_half_precision_is_rounded_once(published, tmp_path, dtype, torch_dtype):
    folder, model = published["llama"]
    export_folder(folder, tmp_path / "hf", dtype=dtype)
    other = load(tmp_path / "hf")
    assert other.dtype == getattr(torch, torch_dtype)
    mine = tensors_of(model)["layers.1.mlp.linear_fc2.weight"].to(other.dtype)
    assert torch.equal(other.model.layers[1].mlp.down_proj.weight, mine)


def test_the_card_says_what_it_was_trained_by(published, tmp_path):
    folder, _ = published["qwen2"]
    export_folder(folder, tmp_path / "hf", {"loss": 4.25, "validation_loss": 4.5, "step": 3})
    card = (tmp_path / "hf" / "README.md").read_text()
    for text in (
        "# Qwen2 of",
        "1,280 tokens in fp32",
        FINGERPRINT,
        COMMIT,
        "4.2500 nats",
        "4.5000",
    ):
        assert text in card


def test_the_same_model_gives_the_same_bytes(published, tmp_path):
    folder, _ = published["gpt2"]
    for name in "ab":
        export_folder(folder, tmp_path / name, max_shard_gigabytes=1e-5)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_a_failure_leaves_the_old_export(published, tmp_path):
    folder, _ = published["gpt2"]
    export_folder(folder, tmp_path / "hf")
    before = contents(tmp_path / "hf")
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch.object(export_module, "save_file", side_effect=full),
        pytest.raises(UserError, match=r"could not be written .* No space left on device"),
    ):
        export_folder(folder, tmp_path / "hf", dtype="bf16")
    assert contents(tmp_path / "hf") == before
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_none_writes_a_note(published, tmp_path):
    folder, _ = published["gpt2"]
    assert "note only" in export_folder(folder, tmp_path / "hf", format="none")
    assert list(contents(tmp_path / "hf")) == ["README.md"]


def test_other_files_are_never_replaced(published, tmp_path):
    folder, _ = published["gpt2"]
    for output, complaint in ((folder, "holds run_config.json"), (folder / "train.log", "a file")):
        with pytest.raises(UserError, match=complaint):
            export_folder(folder, output)
    assert (folder / "run_config.json").is_file()
    with pytest.raises(UserError, match=r"no run_config\.json .* no manifest\.json"):
        export_folder(tmp_path, tmp_path / "hf")


@pytest.mark.parametrize(
    ("value", "dtype", "complaint"),
    [
        (1e6, "fp16", "has numbers up to 1e.06, too large for it; write export.dtype: fp32"),
        (float("nan"), "fp32", "not finite: this model's training failed"),
    ],
)
def test_numbers_that_do_not_fit(tmp_path, tokenizer, value, dtype, complaint):
    tensors = tensors_of(ours(gpt2()))
    tensors["final_layernorm.bias"] = torch.full_like(tensors["final_layernorm.bias"], value)
    model = publish(tmp_path, configuration(gpt2(), tokenizer), tensors, tokenizer)
    with pytest.raises(UserError, match=rf"ln_f.bias.* {complaint}"):
        export_folder(model, tmp_path / "hf", dtype=dtype)
    assert not (tmp_path / "hf").exists()


def test_another_tokenizer_or_model_is_refused(tmp_path, tokenizer):
    tensors = tensors_of(ours(gpt2()))
    other = configuration(gpt2(), train(texts=("other words " * 9,), vocab_size=260))
    facts = other.data.model_copy(update={"vocab_size": VOCABULARY})
    model = publish(tmp_path, other.model_copy(update={"data": facts}), tensors, tokenizer)
    with pytest.raises(UserError, match=r"tokenizer\.json: is not the tokenizer"):
        export_folder(model, tmp_path / "hf")

    section = gpt2(qk_norm=True)
    config = configuration(section, tokenizer)
    model = publish(tmp_path, config, tensors_of(ours(section)), tokenizer)
    with pytest.raises(UserError, match=r"^model\.qk_norm = true: .* or export\.format: none"):
        export_folder(model, tmp_path / "hf")


@given(st.lists(st.integers(0, 9), min_size=1), st.integers(0, 20))
def test_shards_keep_order_and_limit(sizes, limit):
    named = {f"t{n}": size for n, size in enumerate(sizes)}
    shards = plan_shards(named, limit)
    assert [name for shard in shards for name in shard] == list(named)
    assert all(len(shard) == 1 or sum(named[n] for n in shard) <= limit for shard in shards)


# ---- the tokenizer


def described(backend, eod=EOD):
    return TextTokenizer(backend, describe_tokenizer(backend, "tokenizer_json", eod))


def from_gpt2():
    vocab, merges = gpt2_files()
    options = TokenizerOptions(kind="gpt2", vocab_file=str(vocab), merges_file=str(merges))
    return described(take_tokenizer(options))


def from_sentencepiece():
    merged = {"\u2581a": -1.0, "ab": -2.0, "\u2581ab": -3.0}
    pieces = sentencepiece_model("abc \u2581", merged, add_dummy_prefix=True)
    return described(to_tokenizer(pieces, "tiny"), "</s>")


def from_json(folder):
    """One that would put tokens around a text, and sets a space before it."""
    backend = train(vocab_size=VOCABULARY).backend
    backend.pre_tokenizer = ByteLevel(add_prefix_space=True)
    backend.post_processor = TemplateProcessing(single=f"{EOD} $A", special_tokens=[(EOD, 0)])
    backend.save(str(folder / "tokenizer.json"))
    return described(from_tokenizer_json(folder / "tokenizer.json"))


@pytest.fixture(scope="module", params=["gpt2", "llama", "qwen2", "qwen3"])
def tokenizers(request, tmp_path_factory, tokenizer):
    """Ours and theirs of the same model; each family with a tokenizer of another kind."""
    folder = tmp_path_factory.mktemp("tokenizer")
    mine = {
        "gpt2": from_gpt2,
        "llama": from_sentencepiece,
        "qwen2": lambda: tokenizer,
        "qwen3": lambda: from_json(folder),
    }[request.param]()
    config = configuration(MODELS[request.param], mine)
    shapes = parameter_shapes(config.model, mine.vocab_size)
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    export_folder(publish(folder, config, tensors, mine), folder / "hf")
    # AutoTokenizer of transformers 5 takes Qwen's rules for every qwen2; the card says so.
    name = "PreTrainedTokenizerFast" if request.param == "qwen2" else "AutoTokenizer"
    assert f"{name}.from_pretrained" in (folder / "hf" / "README.md").read_text()
    return mine, getattr(transformers, name).from_pretrained(folder / "hf")


PARTS = st.sampled_from([EOD, "</s>", "<unk>", "<s>", " ", "\n", "ab", "12", "def ", "\u4e16"])


@given(parts=st.lists(PARTS | st.text()))
def test_the_same_ids(tokenizers, parts):
    mine, other = tokenizers
    text = "".join(parts)
    assert other(text)["input_ids"] == mine.encode(text)
    assert other.decode(mine.encode(text), skip_special_tokens=True) == mine.decode(
        mine.encode(text)
    )


def test_what_their_tokenizer_knows(tokenizers):
    mine, other = tokenizers
    assert len(other) == mine.vocab_size
    assert other.eos_token_id == other.bos_token_id == mine.eod_id
    assert other.model_max_length == 32
    assert set(other("a")) == {"input_ids", "attention_mask"}
