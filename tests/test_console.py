"""What a progress line says."""

import pytest

from lib import console
from lib.console import Counter


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_rates_and_time_left_leave_out_what_was_done_before(clock):
    """40 documents of an earlier run, then 20 in 10 s: 2 a second, and 40 more take 20 s."""
    counter = Counter("tokenising", 100, "documents")
    clock[0] += 1000.0
    counter.begin_at(40)
    clock[0] += 10.0
    counter.advance(15, MB=9.0, tokens=2_000)
    counter.advance(5, MB=6.0, tokens=3_000)
    assert counter.line() == (
        "tokenising: 60 of 100 documents, 2 documents/s, 1.5 MB/s, 500 tokens/s, 20 s left"
    )


def test_without_a_total_there_is_no_time_left(clock):
    counter = Counter("downloading", None, "bytes")
    clock[0] += 2.0
    counter.advance(3_000)
    assert counter.line() == "downloading: 3,000 bytes, 1,500 bytes/s"
