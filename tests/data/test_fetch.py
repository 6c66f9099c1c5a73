"""Known fault B09: a download that was cut short must never pass for the file."""

import hashlib
from pathlib import Path

import pytest

from lib.data import fetch as fetch_module
from lib.data.fetch import fetch, file_name_of
from lib.data.options import CorpusOptions, UrlOptions
from lib.data.rejections import Rejections
from lib.data.sources import locate_files, read_documents
from lib.errors import UserError
from tests.data.half_server import Site, serving

SECTION = "corpora.web"
CONTENT = b"".join(b'{"text": "document %d"}\n' % number for number in range(20_000))


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "_PAUSE_S", 0.0)


def ignore(_count: int) -> None:
    pass


def options_for(site: Site, content: bytes = CONTENT) -> UrlOptions:
    return UrlOptions(url=site.url, sha256=hashlib.sha256(content).hexdigest())


def test_whole_file_is_fetched_once(tmp_path: Path) -> None:
    received: list[int] = []
    with serving(Site(CONTENT)) as site:
        path = fetch(options_for(site), tmp_path, SECTION, received.append)
        again = fetch(options_for(site), tmp_path, SECTION, received.append)
    assert path == again
    assert path.read_bytes() == CONTENT
    assert path.name.endswith("corpus.jsonl")
    assert sum(received) == len(CONTENT)
    assert site.ranges == [None]


def test_broken_download_goes_on_from_where_it_broke(tmp_path: Path) -> None:
    with serving(Site(CONTENT, breaks=2)) as site:
        path = fetch(options_for(site), tmp_path, SECTION, ignore)
    half = len(CONTENT) // 2
    assert path.read_bytes() == CONTENT
    assert site.ranges == [None, f"bytes={half}-", f"bytes={half + (len(CONTENT) - half) // 2}-"]


def test_server_without_ranges_starts_over(tmp_path: Path) -> None:
    with serving(Site(CONTENT, breaks=1, supports_ranges=False)) as site:
        path = fetch(options_for(site), tmp_path, SECTION, ignore)
    assert path.read_bytes() == CONTENT


def test_server_that_always_breaks_is_an_error_and_keeps_what_it_gave(tmp_path: Path) -> None:
    with serving(Site(CONTENT, breaks=10**9, supports_ranges=False)) as site:
        with pytest.raises(UserError, match=r"connection ended after .* run the stage again"):
            fetch(options_for(site), tmp_path, SECTION, ignore)
        (partial,) = tmp_path.iterdir()
        assert partial.name.endswith(".partial")
        assert partial.read_bytes() == CONTENT[: len(CONTENT) // 2]
        site.breaks, site.supports_ranges = 0, True
        site.ranges.clear()
        path = fetch(options_for(site), tmp_path, SECTION, ignore)  # as the next run of the stage
    assert site.ranges == [f"bytes={len(CONTENT) // 2}-"]
    assert path.read_bytes() == CONTENT
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("breaks", [0, 1])
def test_length_unknown_is_judged_by_checksum(tmp_path: Path, breaks: int) -> None:
    with serving(Site(CONTENT, breaks=breaks, tells_length=False)) as site:
        if breaks:
            with pytest.raises(UserError, match="sha256"):
                fetch(options_for(site), tmp_path, SECTION, ignore)
            assert list(tmp_path.iterdir()) == []
        else:
            assert fetch(options_for(site), tmp_path, SECTION, ignore).read_bytes() == CONTENT


@pytest.mark.parametrize("there", [CONTENT[: len(CONTENT) // 2], b"x" * len(CONTENT), b""])
def test_wrong_file_at_the_final_path_is_fetched_again(tmp_path: Path, there: bytes) -> None:
    with serving(Site(CONTENT)) as site:
        path = fetch(options_for(site), tmp_path, SECTION, ignore)
        path.write_bytes(there)
        assert fetch(options_for(site), tmp_path, SECTION, ignore).read_bytes() == CONTENT
    assert site.ranges == [None, None]


@pytest.mark.parametrize(
    "stale", [b"y" * 1000, CONTENT, CONTENT + b"more", b"y" * len(CONTENT)], ids=len
)
def test_partial_file_of_another_version_is_dropped(tmp_path: Path, stale: bytes) -> None:
    with serving(Site(CONTENT)) as site:
        path = fetch(options_for(site), tmp_path, SECTION, ignore)
        path.unlink()
        path.with_name(path.name + ".partial").write_bytes(stale)
        assert fetch(options_for(site), tmp_path, SECTION, ignore).read_bytes() == CONTENT


def test_wrong_checksum_names_both(tmp_path: Path) -> None:
    with (
        serving(Site(CONTENT)) as site,
        pytest.raises(UserError) as caught,
    ):
        fetch(options_for(site, b"another"), tmp_path, SECTION, ignore)
    assert hashlib.sha256(CONTENT).hexdigest() in str(caught.value)
    assert f"{SECTION}.urls says" in str(caught.value)
    assert hashlib.sha256(b"another").hexdigest() in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("status", "requests"), [(404, 1), (403, 1), (503, 5)])
def test_refusals_are_final_only_where_they_are_meant(
    tmp_path: Path, status: int, requests: int
) -> None:
    with serving(Site(CONTENT, status=status)) as site:
        with pytest.raises(UserError, match=f"server says {status}"):
            fetch(options_for(site), tmp_path, SECTION, ignore)
        assert len(site.ranges) == requests


def test_unreachable_server(tmp_path: Path) -> None:
    with serving(Site(CONTENT)) as site:
        pass
    with pytest.raises(UserError, match="check network and URL"):
        fetch(options_for(site), tmp_path, SECTION, ignore)


def test_file_name_ignores_the_query() -> None:
    assert file_name_of("https://host/a/b%20c.jsonl.zst?download=1#x") == "b c.jsonl.zst"
    assert file_name_of("https://host/a%2F..%2F..%2Fb.txt") == "b.txt"


def test_documents_of_a_url_name_the_url(tmp_path: Path) -> None:
    with serving(Site(CONTENT, breaks=1)) as site:
        options = CorpusOptions(source="url", urls=(options_for(site),))
        files = locate_files(SECTION, options, tmp_path, ignore)
    documents = list(read_documents(options, files, Rejections(SECTION, options)))
    assert len(documents) == 20_000
    assert documents[2] == ("document 2", site.url, 3)


def test_unknown_ending_is_refused_before_anything_is_downloaded(tmp_path: Path) -> None:
    url = UrlOptions(url="http://127.0.0.1:9/corpus.zip", sha256="0" * 64)
    options = CorpusOptions(source="url", urls=(url,))
    with pytest.raises(UserError, match=r"corpus\.zip: unknown kind of file"):
        locate_files(SECTION, options, tmp_path / "none", ignore)
    assert not Path(tmp_path / "none").exists()


def test_full_disk_is_no_broken_connection(tmp_path: Path) -> None:
    with serving(Site(CONTENT)) as site:
        path = fetch(options_for(site), tmp_path, SECTION, ignore)
        path.unlink()
        path.with_name(path.name + ".partial").symlink_to("/dev/full")
        site.ranges.clear()
        with pytest.raises(UserError, match="No space left on device; free space"):
            fetch(options_for(site), tmp_path, SECTION, ignore)
        assert site.ranges == [None]
