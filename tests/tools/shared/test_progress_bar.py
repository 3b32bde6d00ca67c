"""Progress bars: on a terminal only, with the time left, and gone at the end."""

import os
import pty
import sys
import threading

import pytest

from nemo_geomask.tools.shared.progress_bar import print_time_left, track


class Terminal:
    """A terminal, and all that is written to it."""

    def __enter__(self):
        self._reader, writer = pty.openpty()
        self.stream = os.fdopen(writer, "w")
        self._chunks = []
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        return self

    def _read(self):
        try:
            while chunk := os.read(self._reader, 4096):
                self._chunks.append(chunk)
        except OSError:  # the other end is closed
            pass

    def __exit__(self, *error):
        self.stream.close()
        self._thread.join()
        os.close(self._reader)

    @property
    def text(self):
        return b"".join(self._chunks).decode()


def tracked(items, total, monkeypatch):
    """Items that were tracked, and what a terminal showed meanwhile."""
    monkeypatch.setenv("TERM", "xterm-256color")
    with Terminal() as terminal:
        monkeypatch.setattr(sys, "__stderr__", terminal.stream)
        seen = list(track(items, total, "reading files"))
    return seen, terminal.text


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_shows_what_is_done_and_the_line_is_erased(monkeypatch, no_color):
    pytest.importorskip("rich")
    monkeypatch.setenv("NO_COLOR", no_color)
    seen, text = tracked(iter("abcd"), 4, monkeypatch)
    assert seen == ["a", "b", "c", "d"]
    assert "reading files" in text
    assert "100%" in text
    assert text.endswith("\x1b[2K")
    assert ("\x1b[3" in text) == (not no_color)


def test_what_is_no_terminal_gets_nothing(monkeypatch, tmp_path):
    for stream in (None, (tmp_path / "out").open("w+")):
        monkeypatch.setattr(sys, "__stderr__", stream)
        assert list(track(range(3), 3, "reading")) == [0, 1, 2]
    assert stream.tell() == 0
    monkeypatch.setitem(sys.modules, "rich", None)
    assert tracked([0, 1], 2, monkeypatch) == ([0, 1], "")


def test_the_bar_goes_away_with_an_error(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")

    def items():
        yield 1
        raise ValueError("broken")

    with Terminal() as terminal:
        monkeypatch.setattr(sys, "__stderr__", terminal.stream)
        with pytest.raises(ValueError, match="broken"):
            list(track(items(), 3, "reading"))
    assert terminal.text.endswith("\x1b[2K")


def test_time_left_is_that_of_equally_long_items(monkeypatch, capsys):
    print_time_left(3, 12, 20.0, "cases")
    assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    print_time_left(3, 12, 20.0, "cases")
    print_time_left(12, 12, 80.0, "cases")
    assert capsys.readouterr().err == "3 of 12 cases in 20 s, about 60 s left\n"
