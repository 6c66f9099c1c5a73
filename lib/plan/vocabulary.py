"""How many tokens a run of params.yaml knows, for what is asked before there are tokens."""

from pathlib import Path

from lib.config.data_rules import TOKENIZER_INFO, read_tokenizer_facts
from lib.config.params_file import ParamsFile
from lib.data.options import TokenizerOptions
from lib.errors import UserError


def decided_vocabulary(tokenizer: TokenizerOptions) -> int | None:
    """Tokens that section ``tokenizer`` decides; None where a given tokenizer has its own."""
    return tokenizer.vocab_size if tokenizer.kind == "train_bpe" else None


def vocabulary_of(file: ParamsFile) -> int:
    """Tokens of data/tokenizer, if it is there; else as section ``tokenizer`` decides.

    Raises:
        UserError: data/tokenizer is damaged; or a tokenizer is given, and not there yet.
    """
    if Path(TOKENIZER_INFO).is_file():
        return read_tokenizer_facts().vocab_size
    tokenizer = file.section("tokenizer", TokenizerOptions)
    decided = decided_vocabulary(tokenizer)
    if decided is None:
        raise UserError(
            f"tokenizer.kind = {tokenizer.kind}: how many tokens it has is known once it was read; "
            "run dvc repro prepare_tokenizer"
        )
    return decided
