"""Byte-level tokenizers of the kinds in use, for tests of how they encode."""

import base64
import json

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from lib.data.byte_alphabet import in_byte_alphabet
from lib.data.tokenizer import TextTokenizer, describe_tokenizer
from lib.data.tokenizer_sources import from_gpt2
from tests.data.tiny_tokenizer import EOD, TRAINING_TEXT, gpt2_files, package_file, train

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA3 = (
    CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    rf"{CONTRACTIONS}?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    rf"{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def with_eod(backend: Tokenizer) -> TextTokenizer:
    backend.add_special_tokens([EOD])
    return TextTokenizer(backend, describe_tokenizer(backend, "tokenizer_json", EOD))


def split_by(backend: Tokenizer, pattern: str, behavior="isolated", invert=False) -> Tokenizer:
    """The tokenizer with Llama 3's kind of pre-tokenizer."""
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior, invert),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def bpe(merges, ids=None, *, ignore_merges=False) -> Tokenizer:
    """All bytes, then what the merges make, in their order, cut as GPT-2 does."""
    tokens = [in_byte_alphabet(bytes([byte])) for byte in range(256)]
    tokens += list(dict.fromkeys(a + b for a, b in merges))
    vocab = {token: number for number, token in enumerate(tokens)} | (ids or {})
    backend = Tokenizer(BPE(vocab, merges, ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def trained_with(pattern: str) -> TextTokenizer:
    """A small one trained with a pattern."""
    backend = split_by(Tokenizer(BPE()), pattern)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([TRAINING_TEXT * 3, "It's we'll 12345 a\n\n b  c"], trainer)
    return with_eod(backend)


def tekken(size=6000) -> TextTokenizer:
    """The first tokens of a real vocabulary made by tiktoken's rule, converted as Llama 3's is.

    Every way to put a token together from two others is a merge.
    """
    content = json.loads(package_file("mistral_common", "tekken_240718.json").read_text())
    tokens = [base64.b64decode(entry["token_bytes"]) for entry in content["vocab"][:size]]
    known = set(tokens)
    merges = [
        (in_byte_alphabet(token[:cut]), in_byte_alphabet(token[cut:]))
        for token in tokens
        for cut in range(1, len(token))
        if token[:cut] in known and token[cut:] in known
    ]
    vocab = {in_byte_alphabet(token): number for number, token in enumerate(tokens)}
    assert content["config"]["pattern"] == TEKKEN
    return with_eod(split_by(Tokenizer(BPE(vocab, merges, ignore_merges=True)), TEKKEN))


def gpt2() -> TextTokenizer:
    backend = from_gpt2(*gpt2_files())
    return TextTokenizer(backend, describe_tokenizer(backend, "gpt2", EOD))


MAKERS = {
    "ours": train,
    "gpt2": gpt2,
    "llama3": lambda: trained_with(LLAMA3),
    "gpt4o": lambda: trained_with(GPT4O),
    "tekken": tekken,
}
