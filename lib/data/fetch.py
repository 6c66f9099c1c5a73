"""Downloads that are whole or not there: resumed after a break, proven by size and sha256.

The bytes go to ``NAME.partial`` and get their name only once the checksum is right. A partial
file outlives the stage, so the next run asks for the rest (an HTTP Range request). A file that is
already there is trusted as little: its checksum is taken again.
"""

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from lib.atomic import PARTIAL_SUFFIX, sha256_of
from lib.data.disk import explain_full_disk
from lib.data.options import UrlOptions
from lib.errors import UserError

_CHUNK = 1 << 18
_TIMEOUT_S = 60.0
# Breaks in a row, without a byte gained, that end the attempt, and the first pause between them.
_MAX_BREAKS = 5
_PAUSE_S = 1.0
# Answers of a server that may pass: timeout, too many requests, and all of 5xx.
_PASSING = (408, 429)


def file_name_of(url: str) -> str:
    """The file name at the end of a URL's path."""
    return PurePosixPath(unquote(urlsplit(url).path)).name


def fetch(file: UrlOptions, folder: Path, section: str, advance: Callable[[int], None]) -> Path:
    """Downloads a file, or finds it downloaded.

    Args:
        file: the URL and its sha256.
        folder: where the file goes. The name holds a part of the checksum, so that a file of
            another version never gets into the way.
        section: the corpus in the parameter file, for messages: ``corpora.NAME``.
        advance: called with every number of bytes received.

    Raises:
        UserError: if the file cannot be had whole and right.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file.sha256[:16]}-{file_name_of(file.url)[-100:]}"
    if path.exists():
        if sha256_of(path) == file.sha256:
            return path
        path.unlink()
    partial = path.with_name(path.name + PARTIAL_SUFFIX)
    while True:
        resumed = partial.exists()
        _download(file.url, partial, section, advance)
        actual = sha256_of(partial)
        if actual == file.sha256:
            partial.replace(path)
            return path
        size = partial.stat().st_size
        partial.unlink()
        if not resumed:  # else the first part may be from another version: once more, from zero
            raise UserError(
                f"{file.url}: the {size:,} bytes received have sha256 {actual}, but "
                f"{section}.urls says {file.sha256}; correct the checksum if the file was meant to "
                "change"
            )


def _download(url: str, partial: Path, section: str, advance: Callable[[int], None]) -> None:
    """Receives until the file is whole by its length, resuming after each break."""
    most, breaks = _size(partial), 0
    while True:
        try:
            total = _receive(url, partial, advance)
            if total is None or _size(partial) == total:
                return
            reason = f"the connection ended after {_size(partial):,} of {total:,} bytes"
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code not in _PASSING:
                raise UserError(
                    f"{url}: the server says {error.code} {error.reason}; correct {section}.urls"
                ) from error
            reason = f"the server says {error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            reason = str(getattr(error, "reason", "") or error) or type(error).__name__
        breaks = 0 if _size(partial) > most else breaks + 1
        most = max(most, _size(partial))
        if breaks >= _MAX_BREAKS:
            raise UserError(
                f"{url}: {reason}, {breaks} times in a row; check network and URL and run the "
                f"stage again: it goes on from the {_size(partial):,} bytes that it has"
            )
        time.sleep(_PAUSE_S * 2**breaks)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _receive(url: str, partial: Path, advance: Callable[[int], None]) -> int | None:
    """One request for what is missing; the length of the whole file, where the server tells."""
    have = _size(partial)
    # Identity: a server that compresses on the way would count other bytes than the file's.
    headers = {"User-Agent": "drydock", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            start = _start_of(response.headers.get("Content-Range")) if have else 0
            append = have > 0 and response.status == 206 and start == have
            length = response.headers.get("Content-Length")
            # Around the file, since its last bytes may be written when it is closed.
            with explain_full_disk(partial.parent), partial.open("ab" if append else "wb") as file:
                _copy(response, file, advance)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing is missing; the checksum tells if that is so
            return have
        raise
    if length is None:
        return None
    return int(length) + (have if append else 0)


def _start_of(content_range: str | None) -> int | None:
    """The first byte of ``bytes FIRST-LAST/TOTAL``."""
    first = (content_range or "").removeprefix("bytes ").partition("-")[0]
    return int(first) if first.isdigit() else None


def _copy(
    response: http.client.HTTPResponse, file: BinaryIO, advance: Callable[[int], None]
) -> None:
    while chunk := response.read1(_CHUNK):
        file.write(chunk)
        advance(len(chunk))
