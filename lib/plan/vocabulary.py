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
    """Tokens as section ``tokenizer`` decides; of a given tokenizer those of data/tokenizer.

    What data/tokenizer holds may be of other parameters, where the tokenizer is trained.

    Raises:
        UserError: a tokenizer is given, and data/tokenizer is damaged or not there yet.
    """
    tokenizer = file.section("tokenizer", TokenizerOptions)
    decided = decided_vocabulary(tokenizer)
    if decided is not None:
        return decided
    if Path(TOKENIZER_INFO).is_file():
        return read_tokenizer_facts().vocab_size
    raise UserError(
        f"tokenizer.kind = {tokenizer.kind}: how many tokens it has is known once it was read; "
        "run dvc repro prepare_tokenizer"
    )
