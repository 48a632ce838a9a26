"""The command line's side of REST: one address, one token, errors as one line and an exit code."""

import time
from enum import IntEnum
from pathlib import Path
from typing import Any

import httpx

__all__ = ["ApiClient", "CliError", "Exit"]

_WHO = "is it an Evenkeel controller?"
_ASK_FOR_S = 10.0
_PAUSE_S = 0.25
"""Behind one address there may be several replicas, of which one leads. Each try is a connection of its own, and may reach
that one; with five replicas one command in ten thousand misses it."""


class Exit(IntEnum):
    """How a command ends. 2 belongs to wrong usage, 130 to Ctrl-C."""

    DONE = 0
    REFUSED = 1
    """The controller said no, or a check failed; the reason is printed."""
    USAGE = 2
    """Wrong options or settings."""
    UNAVAILABLE = 3
    """No controller at that address, or it cannot serve for now: try again."""
    UNAUTHORIZED = 4
    """No token, a wrong one, or one that may only read."""


class CliError(Exception):
    """One line for the operator, and how the process ends."""

    def __init__(self, message: str, code: Exit) -> None:
        super().__init__(message)
        self.code = code


class ApiClient:
    """Calls one controller.

    Raises:
        CliError: a URL or a token that can never be sent.
    """

    def __init__(self, url: str, token: str | None, timeout_s: float = 30.0) -> None:
        if token is not None and not (
            token.isascii() and token.isprintable() and token.split() == [token]
        ):
            raise CliError(
                "the token is empty or has characters other than visible ASCII", Exit.USAGE
            )
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._url = url.rstrip("/")
        try:
            # No proxy from the environment: a token must not take a detour nobody asked for.
            self._http = httpx.Client(
                base_url=self._url,
                headers=headers,
                timeout=timeout_s,
                trust_env=False,
                limits=httpx.Limits(max_keepalive_connections=0),
            )
        except httpx.InvalidURL as error:
            raise CliError(f"{self._url} is no address to call: {error}", Exit.USAGE) from error

    def __enter__(self) -> "ApiClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get(self, path: str, **params: Any) -> Any:
        """GET /v1/path; None-valued parameters are left out."""
        return self._call("GET", path, params={k: v for k, v in params.items() if v is not None})

    def post(self, path: str, body: Any = None) -> Any:
        """POST /v1/path; None where the answer has no body."""
        return self._call("POST", path, json=body)

    def patch(self, path: str, body: Any) -> Any:
        """PATCH /v1/path."""
        return self._call("PATCH", path, json=body)

    def every(self, path: str) -> list[Any]:
        """All items of a paged list."""
        items: list[Any] = []
        token: str | None = None
        while True:
            page = self.get(path, page_token=token)
            try:
                items += page["items"]
                token = page["next_page_token"]
            except (KeyError, TypeError) as error:
                raise CliError(
                    f"{self._url} answered no list of {path}; {_WHO}", Exit.REFUSED
                ) from error
            if token is None:
                return items

    def deployment(self, name: str | None) -> str:
        """The deployment meant: the named one, or the only one there is.

        Raises:
            CliError: none or several to choose from.
        """
        if name is not None:
            return name
        names = [row["deployment"] for row in self.every("deployments")]
        if len(names) == 1:
            return str(names[0])
        if not names:
            raise CliError("the controller knows no deployment yet", Exit.REFUSED)
        raise CliError(f"several deployments, name one with -d: {', '.join(names)}", Exit.USAGE)

    def _call(self, method: str, path: str, **kwargs: Any) -> Any:
        try:
            response = self._http.request(method, f"/v1/{path}", **kwargs)
            give_up_at = time.monotonic() + _ASK_FOR_S
            while _led_elsewhere(response) and time.monotonic() < give_up_at:
                time.sleep(_PAUSE_S)
                response = self._http.request(method, f"/v1/{path}", **kwargs)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise CliError(f"{self._url} is no address to call: {error}", Exit.USAGE) from error
        except httpx.RequestError as error:
            raise CliError(f"no answer from {self._url}: {error}", Exit.UNAVAILABLE) from error
        except ValueError as error:
            # Bytes of the command line that are no text, or a number that JSON cannot say.
            raise CliError(f"cannot ask {self._url}: {error}", Exit.USAGE) from error
        if not response.is_success:
            raise _refusal(self._url, response)
        if response.status_code == httpx.codes.NO_CONTENT:
            return None
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise CliError(
                f"{self._url} answered {response.status_code} and no JSON object; {_WHO}",
                Exit.REFUSED,
            )
        return answer


def _led_elsewhere(response: httpx.Response) -> bool:
    """Whether another replica leads what was asked about; this one changed nothing."""
    if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
        return False
    try:
        problem = response.json()
        return problem["reason"] == "not_leader" and problem["leader"] is not None
    except (ValueError, KeyError, TypeError):
        return False


def _refusal(url: str, response: httpx.Response) -> CliError:
    try:
        problem = response.json()
        text = f"{problem['title']}: {problem['detail']}"
        if problem.get("reason"):
            text += f" ({problem['reason']})"
    except (ValueError, KeyError, TypeError):
        text = f"{url} answered {response.status_code} and no problem details; {_WHO}"
    code = {401: Exit.UNAUTHORIZED, 403: Exit.UNAUTHORIZED, 503: Exit.UNAVAILABLE}
    return CliError(text, code.get(response.status_code, Exit.REFUSED))


def read_token(token: str | None, token_file: Path | None, local_file: Path) -> str | None:
    """The token to send: given, from a file, or from a controller's data folder on this machine.

    A file may hold several tokens in the controller's format; the first that may operate is sent.

    Raises:
        CliError: the named file cannot be read.
    """
    if token is not None:
        return token
    path = token_file if token_file is not None else local_file
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if token_file is None:
            return None
        raise CliError(f"no token file {path}", Exit.USAGE) from None
    except OSError as error:
        raise CliError(
            f"cannot read the token file {path}: {error.strerror}", Exit.USAGE
        ) from error
    except UnicodeError as error:
        raise CliError(f"the token file {path} is not UTF-8 text: {error}", Exit.USAGE) from error
    lines = [line.split("#", 1)[0].split() for line in text.splitlines()]
    secrets = [words for words in lines if words]
    operating = [words for words in secrets if not (len(words) == 3 and words[1] == "read")]
    chosen = (operating or secrets)[:1]
    return chosen[0][-1] if chosen else None
