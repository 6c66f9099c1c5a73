"""What a progress line says."""

import io
import re

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


@pytest.fixture
def terminal(monkeypatch):
    """Makes standard output a terminal of so many columns; the answer gives its lines."""

    def open_terminal(columns):
        screen = io.StringIO()
        screen.isatty = lambda: True
        monkeypatch.setattr(console.sys, "stdout", screen)
        monkeypatch.setenv("COLUMNS", str(columns))
        return lambda: re.sub(r"\x1b\[[0-9;]*m", "", screen.getvalue()).splitlines()

    return open_terminal


@pytest.mark.parametrize("columns", [80, 70])
def test_a_table_too_wide_for_the_terminal_loses_its_frame_and_no_digit(terminal, columns):
    """Eleven columns of numbers, as of memory by kind: 93 columns with a frame, 70 without."""
    lines = terminal(columns)
    headers = ("stage", "layers", "at", "kept", "weights", "grads", "optim", "activ", "logits")
    row = ("0", "32", "end", "128", "12.83", "28.87", "9.62", "116.14", "0.38", "25.74", "1077.1")
    console.table("memory", [row], (*headers, "buffers", "all"))
    assert max(map(len, lines())) <= columns
    assert list(row) in [line.split() for line in lines()]


@pytest.mark.parametrize("columns", [80, 30])
@pytest.mark.parametrize("headers", [(), ("name", "value")])
def test_a_long_cell_is_folded_and_never_cut(terminal, columns, headers):
    lines = terminal(columns)
    digits = "0123456789" * 20
    console.table("figures", [("all", digits)], headers)
    assert max(map(len, lines())) <= columns
    assert re.sub(r"\D", "", "".join(lines())) == digits


def test_a_table_that_fits_has_its_frame(terminal):
    lines = terminal(80)
    console.table("figures", [("a", "1")], ("name", "value"))
    assert "\u2502 a    \u2502 1     \u2502" in lines()
