"""Progress bars: on a terminal only, after a delay, with the time left, and gone at the end."""

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


def test_items_and_their_order_are_kept():
    with Terminal() as terminal:
        assert list(track(iter("abc"), 3, "reading", delay=0.0, stream=terminal.stream)) == ["a", "b", "c"]


def test_a_terminal_shows_what_is_done_and_what_is_left(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")
    with Terminal() as terminal:
        for _ in track(range(4), 4, "reading files", delay=0.0, stream=terminal.stream):
            pass
    assert "reading files" in terminal.text
    assert "4/4" in terminal.text
    assert terminal.text.endswith("\x1b[2K")  # the line is erased


def test_no_color_is_respected(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "1")
    with Terminal() as terminal:
        list(track(range(4), 4, "reading files", delay=0.0, stream=terminal.stream))
    assert "reading files" in terminal.text
    assert "\x1b[3" not in terminal.text  # no colour


def test_work_of_a_moment_shows_nothing():
    with Terminal() as terminal:
        assert list(track(range(3), 3, "reading", stream=terminal.stream)) == [0, 1, 2]
    assert terminal.text == ""


def test_a_file_gets_nothing(tmp_path):
    with (tmp_path / "out").open("w+") as file:
        assert list(track(range(3), 3, "reading", delay=0.0, stream=file)) == [0, 1, 2]
        assert file.tell() == 0


def test_the_bar_goes_away_with_an_error(monkeypatch):
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm")

    def items():
        yield 1
        yield 2
        raise ValueError("broken")

    with Terminal() as terminal, pytest.raises(ValueError, match="broken"):
        list(track(items(), 3, "reading", delay=0.0, stream=terminal.stream))
    assert terminal.text.endswith("\x1b[2K")


def test_time_left_is_that_of_equally_long_items(monkeypatch, capsys):
    print_time_left(3, 12, 20.0, "cases")
    assert capsys.readouterr().err == ""  # no terminal
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    print_time_left(3, 12, 20.0, "cases")
    print_time_left(12, 12, 80.0, "cases")
    assert capsys.readouterr().err == "3 of 12 cases in 20 s, about 60 s left\n"
