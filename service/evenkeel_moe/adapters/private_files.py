"""Files and folders of our own in a place where other users may write, such as a shared folder.

What another user prepared there is refused by its name: a link would lead what we write, or read,
to a place of their choice.
"""

import errno
import os
import stat
import tempfile
from pathlib import Path

from evenkeel_moe.errors import InvalidInput


def take_folder(path: Path) -> None:
    """Make a folder for this user alone, or take over one of ours with all that is in it.

    Folders get the mode 0700 and files 0600.

    Raises:
        InvalidInput: the folder, or something in it, is a link or belongs to another user.
        OSError: it cannot be made or read.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    _take(path)
    for inside in path.rglob("*"):
        try:
            _take(inside)
        except FileNotFoundError:
            continue  # The store of another controller may be removing it; its lock is asked next.


def _take(path: Path) -> None:
    fd = _open_own(path)
    try:
        found = os.fstat(fd)
        if found.st_uid == os.geteuid():
            os.fchmod(fd, 0o700 if stat.S_ISDIR(found.st_mode) else 0o600)
    finally:
        os.close(fd)


def read_own(path: Path) -> str:
    """Return the text of a file that this user or root made, and not everyone can write.

    Raises:
        InvalidInput: it is a link, or belongs to another user, or every user can write it.
        OSError, UnicodeError: it cannot be read.
    """
    with open(_open_own(path), encoding="utf-8") as file:
        if os.fstat(file.fileno()).st_mode & stat.S_IWOTH:
            raise InvalidInput(f"{path} can be written by every user, and is not used")
        return file.read()


def write_private(path: Path, text: str) -> None:
    """Write a file for this user alone; it appears whole or not at all, and replaces a link.

    Raises:
        OSError: it cannot be written.
    """
    fd, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)
    draft = Path(name)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _open_own(path: Path) -> int:
    """Open a file or a folder of ours for reading.

    Raises:
        InvalidInput: it is a link, or belongs to another user.
        OSError: it cannot be opened.
    """
    try:
        # A pipe in its place would wait for a writer.
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise InvalidInput(f"{path} is a link, and is not used: it may lead anywhere") from None
    owner, ours = os.fstat(fd).st_uid, os.geteuid()
    if owner not in (0, ours):
        os.close(fd)
        raise InvalidInput(f"{path} belongs to user {owner}, and is not used by user {ours}")
    return fd
