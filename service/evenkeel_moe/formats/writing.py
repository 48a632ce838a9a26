"""The one way files are written."""

from pathlib import Path

from evenkeel_moe.errors import InvalidInput

__all__ = ["write_file"]


def write_file(path: Path | str, content: str | bytes) -> None:
    """Write a file; text as UTF-8.

    Raises:
        InvalidInput: no folder, no right, no room; the message names the file.
    """
    try:
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be written: {error.strerror or error}") from error
