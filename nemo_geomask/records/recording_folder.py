"""Folder that a recorder writes to: which of its files the recorder may replace, and whether it still exists."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
from pathlib import Path

from nemo_geomask.records.record_schema import RecordOrigin, file_name, file_step
from nemo_geomask.records.stored_files import FileIdentity, identify

_log = logging.getLogger("nemo_geomask")
_MARK = ".recorder.lock"


class RecordingFolder:
    """State of a recorder's folder, which may be removed or replaced while it writes.

    A recorder marks its folder by a lock, which ends with its process. Files that were there before belong to an
    earlier run, which this one continues, and may be replaced; unless another recorder holds the lock.

    Attributes:
        replaceable: files that may be replaced, by name.
    """

    def __init__(self, directory: Path) -> None:
        self.replaceable: dict[str, FileIdentity] = {}
        self._directory = directory
        self._identity: tuple[int, int] | None = None
        self._mark: int | None = None

    def enter(self, folder: int, origin: RecordOrigin) -> None:
        """Note which folder is written to, before each file; look at its files if it is another than before.

        Args:
            folder: descriptor of the folder.
            origin: what writes the files.
        """
        status = os.fstat(folder)
        identity = status.st_dev, status.st_ino
        if identity == self._identity:
            return
        self.close()
        self._identity = identity
        try:
            is_alone = self._hold(folder)
        except OSError:  # the file system has no locks
            is_alone = True
        files = _list_identities(folder)
        self.replaceable = files if is_alone else {}
        if not is_alone:
            _log.warning(
                "records: another process records into %s, too; the files of both are kept, but no command will read "
                "them together: set another loss_fn.record.dir for one of them",
                self._directory,
            )
        if origin.id:
            self._warn_of_later_steps(files, origin)

    def close(self) -> None:
        """Let other recorders write into the folder."""
        mark, self._mark, self._identity = self._mark, None, None
        if mark is not None:
            with contextlib.suppress(OSError):
                os.close(mark)

    def _hold(self, folder: int) -> bool:
        """Lock the folder; return False if another recorder has locked it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        mark = os.open(_MARK, flags, 0o666, dir_fd=folder)
        try:
            fcntl.flock(mark, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(mark)
            return False
        except OSError:
            os.close(mark)
            raise
        self._mark = mark
        return True

    def _warn_of_later_steps(self, files: dict[str, FileIdentity], origin: RecordOrigin) -> None:
        """Warn if the folder holds later steps already."""
        first_name = file_name(origin.first_step, "~")  # "~" sorts after the names of all writers
        later = [name for name in files if file_step(Path(name)) is not None and name > first_name]
        if later:
            _log.warning(
                "records: %s holds %d files of steps after %d, the last %s, from an earlier run; diagnose leaves them "
                "out. Unless this run continues that one, set another loss_fn.record.dir or delete the files",
                self._directory,
                len(later),
                origin.first_step,
                max(later),
            )


def _list_identities(folder: int) -> dict[str, FileIdentity]:
    """Return the identity of each regular file in a folder."""
    with os.scandir(folder) as entries:
        statuses = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    return {name: identify(status) for name, status in statuses if stat.S_ISREG(status.st_mode)}
