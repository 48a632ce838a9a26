"""The file of contexts: named controllers with their tokens, and the one in use."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from evenkeel_moe.adapters.private_files import read_own, write_private
from evenkeel_moe.cli.exits import CliError

_FORBID = ConfigDict(extra="forbid", frozen=True)


class Context(BaseModel):
    """The controller that commands call if no option and no environment variable names one."""

    model_config = _FORBID

    address: str | None = None
    """REST address of a controller."""
    token_file: Path | None = None
    ca_file: Path | None = None
    deployment: str | None = None


class Contexts(BaseModel):
    """The content of the file."""

    model_config = _FORBID

    current: str | None = None
    """Name of the context in use."""
    contexts: dict[str, Context] = {}


def named_context(file: Path, known: Contexts, name: str) -> Context:
    """Return the context of this name.

    Raises:
        CliError: there is none.
    """
    if name not in known.contexts:
        names = ", ".join(known.contexts) or "none"
        raise CliError(f"there is no context {name!r} in {file}; known: {names}")
    return known.contexts[name]


def read_contexts(path: Path) -> Contexts:
    """Return what the file holds; nothing if it is missing.

    Raises:
        CliError: it cannot be read, is no such file, or belongs to somebody else.
    """
    try:
        return Contexts.model_validate_json(read_own(path))
    except FileNotFoundError:
        return Contexts()
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise CliError(f"{path}: {where}: {first['msg']}") from error
    except (OSError, UnicodeError) as error:
        raise CliError(f"cannot read {path}: {error}") from error


def write_contexts(path: Path, contexts: Contexts) -> None:
    """Write the file for this user alone.

    Raises:
        CliError: it cannot be written.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, contexts.model_dump_json(indent=2, exclude_none=True) + "\n")
    except OSError as error:
        raise CliError(f"cannot write {path}: {error.strerror}") from error


def chosen_context(file: Path, name: str | None) -> Context:
    """Return the named context, else the one in use, else one without values."""
    known = read_contexts(file)
    chosen = name or known.current
    return Context() if chosen is None else named_context(file, known, chosen)
