"""A full disk, told as what it is."""

import errno
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from lib.errors import UserError


@contextmanager
def explain_full_disk(folder: Path) -> Generator[None]:
    """Turns "no space left" and "quota exceeded" within the block into a ``UserError``."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise UserError(
            f"{folder}: {error.strerror}; free space there and run the stage again"
        ) from error
