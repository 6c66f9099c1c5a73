"""Takes a tokenizer that exists already: tokenizer.json, GPT-2's two files, SentencePiece."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from lib.data.options import TokenizerOptions
from lib.data.sentencepiece_model import read_sentencepiece_model, to_tokenizer
from lib.data.tokenizer import parse_tokenizer_json, read_tokenizer_json
from lib.errors import UserError

_PROBE = "a  b\tc\n\n\u00e9\u4e16\U0001f600 'D\u00ef\ufb01' \r\n x"


def take_tokenizer(options: TokenizerOptions) -> Tokenizer:
    """Reads the tokenizer that the options name.

    Raises:
        UserError: when a file is missing, damaged or of another kind.
    """
    if options.kind == "tokenizer_json":
        return from_tokenizer_json(Path(options.path or ""))
    if options.kind == "gpt2":
        return from_gpt2(Path(options.vocab_file or ""), Path(options.merges_file or ""))
    if options.kind == "sentencepiece":
        path = Path(options.path or "")
        return to_tokenizer(read_sentencepiece_model(path), str(path))
    raise ValueError(f"kind {options.kind} is trained, not taken")


def from_tokenizer_json(path: Path) -> Tokenizer:
    """A tokenizer.json without what would change or cut texts from one call to the next."""
    _, content = read_tokenizer_json(path)
    content["truncation"] = None
    content["padding"] = None
    if "dropout" in content["model"]:
        content["model"]["dropout"] = None
    return parse_tokenizer_json(json.dumps(content), str(path))


def from_gpt2(vocab_file: Path, merges_file: Path) -> Tokenizer:
    """GPT-2's ``vocab.json`` (or ``encoder.json``) and ``merges.txt`` (or ``vocab.bpe``).

    Entries that are neither a byte nor the result of a merge cannot come from text; they are the
    control tokens (``<|endoftext|>`` for GPT-2).
    """
    for path in (vocab_file, merges_file):
        if not path.is_file():
            raise UserError(f"{path}: no such file; kind gpt2 needs vocab_file and merges_file")
    try:
        vocab, merges = BPE.read_file(str(vocab_file), str(merges_file))
        backend = Tokenizer(BPE(vocab, merges))
    except Exception as error:  # the library raises bare Exception
        raise UserError(
            f"{vocab_file}, {merges_file}: are no vocabulary and merges of GPT-2's kind: {error}"
        ) from None
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    alphabet = set(ByteLevel.alphabet())
    missing = len(alphabet - vocab.keys())
    if missing:
        raise UserError(
            f"{vocab_file}: lacks {missing} of the 256 bytes, so it is no byte-level vocabulary; "
            "give the tokenizer as tokenizer.json"
        )
    from_text = alphabet | {left + right for left, right in merges}
    controls = sorted(vocab.keys() - from_text, key=vocab.__getitem__)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in controls])
    return backend


def keeps_text(backend: Tokenizer) -> bool:
    """Whether decoding gives a mixed bag of characters and white space back as it was."""
    ids = backend.encode(_PROBE, add_special_tokens=False).ids
    return backend.decode(ids, skip_special_tokens=True) == _PROBE
