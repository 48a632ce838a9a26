"""Writes files, with typed errors."""

from pathlib import Path

from evenkeel_moe.errors import InvalidInput


def write_file(path: Path | str, content: str | bytes) -> None:
    """Write a file; text is encoded as UTF-8.

    Raises:
        InvalidInput: the folder is missing, or permission or space is lacking; the message names
            the file.
    """
    try:
        Path(path).write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise InvalidInput(f"{path}: cannot be written: {error.strerror or error}") from error
