"""Calls the REST API, and turns every failure into one line for the operator and an exit code."""

import re
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from evenkeel_moe.cli.console import say
from evenkeel_moe.cli.exits import CliError, Exit, NotSent
from evenkeel_moe.errors import Reason
from evenkeel_moe.model.quantities import duration_text

_HINT = "is it an Evenkeel controller?"
_RETRY_FOR_S = 10.0
_RETRY_PAUSE_S = 0.25
"""Pause between tries. Several replicas may share one address, and one of them leads the
deployment. Each try opens a new connection, which may reach the leader; with five replicas, one
command in ten thousand misses it."""
_PLANNER_STARTS_WITHIN_S = 600.0
_PLANNER_PAUSE_S = 5.0
"""Pause between tries while the planner starts, if the answer does not say `Retry-After`."""


class ApiClient:
    """A client of the controller at one address.

    Args:
        ca_file: PEM file of the CA that signed the controller's certificate; None trusts the
            public CAs.
        token_words: the origin of the token, or why there is none, for the error about it.

    Raises:
        CliError: the URL or the token is malformed, or the CA file cannot be used.
    """

    def __init__(
        self,
        url: str,
        token: str | None,
        timeout_s: float = 30.0,
        ca_file: Path | None = None,
        token_words: str = "the token is unknown to the controller, or has expired",
    ) -> None:
        if token is not None and not (
            token.isascii() and token.isprintable() and token.split() == [token]
        ):
            raise CliError("the token is empty or contains other characters than visible ASCII")
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._url, self._token_words = url.rstrip("/"), token_words
        self._told_to_wait = False
        try:
            # Proxies from the environment are ignored: a token must not go through an unknown host.
            self._http = httpx.Client(
                base_url=self._url,
                headers=headers,
                timeout=timeout_s,
                trust_env=False,
                verify=True if ca_file is None else _trusting(ca_file),
                limits=httpx.Limits(max_keepalive_connections=0),
            )
        except httpx.InvalidURL as error:
            raise CliError(f"{self._url} is not a valid URL: {error}") from error

    def __enter__(self) -> "ApiClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def get(self, path: str, *, timeout_s: float | None = None, **params: Any) -> Any:
        """Call GET /v1/path; parameters that are None are left out.

        Args:
            path: below /v1/.
            timeout_s: seconds to wait for the answer; None waits as for other requests.
            params: the query.
        """
        given = {name: value for name, value in params.items() if value is not None}
        timeout = {} if timeout_s is None else {"timeout": timeout_s}
        return self._object(self._send("GET", path, params=given, **timeout))

    def get_tagged(self, path: str) -> tuple[Any, str]:
        """Call GET /v1/path; return the answer and its ETag for `if_match`."""
        response = self._send("GET", path)
        return self._object(response), response.headers.get("ETag", "")

    def change(self, method: str, path: str, body: Any = None, *, if_match: str = "") -> Any:
        """Call a method that changes /v1/path; return None if the answer has no body.

        Args:
            method: POST, PATCH or DELETE.
            path: below /v1/.
            body: JSON.
            if_match: ETag of what was looked at; the controller refuses if it is another now.
                Empty changes whatever there is.
        """
        headers = {"If-Match": if_match} if if_match else {}
        response = self._send(method, path, json=body, headers=headers)
        return None if response.status_code == httpx.codes.NO_CONTENT else self._object(response)

    def every(self, path: str, limit: int | None = None) -> list[Any]:
        """Return all items of a paged list, or its first ones."""
        items: list[Any] = []
        token: str | None = None
        while True:
            page = self.get(path, page_token=token, page_size=limit)
            try:
                items += page["items"]
                token = page["next_page_token"]
            except (KeyError, TypeError) as error:
                raise CliError(
                    f"{self._url} did not answer with a list of {path}; {_HINT}", Exit.REFUSED
                ) from error
            if token is None or (limit is not None and len(items) >= limit):
                return items[:limit]

    def deployment(self, name: str | None) -> str:
        """Return the named deployment, or the only one there is.

        Raises:
            CliError: the name is no id; or none is given, and there is not exactly one deployment.
        """
        if name is not None:
            return checked_id(name, "deployment")
        names = [row["deployment"] for row in self.every("deployments")]
        if len(names) == 1:
            return str(names[0])
        if not names:
            raise CliError("the controller has no deployment yet", Exit.REFUSED)
        raise CliError(f"there are several deployments, name one: {', '.join(names)}")

    def _ask_leader(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        response = self._http.request(method, f"/v1/{path}", **kwargs)
        give_up_at = time.monotonic() + _RETRY_FOR_S
        while _led_elsewhere(response) and time.monotonic() < give_up_at:
            time.sleep(_RETRY_PAUSE_S)
            response = self._http.request(method, f"/v1/{path}", **kwargs)
        return response

    def _wait_for_planner(self, ask: Callable[[], httpx.Response]) -> httpx.Response:
        """Ask again while the controller answers that its planner is starting."""
        response = ask()
        give_up_at = time.monotonic() + _PLANNER_STARTS_WITHIN_S
        while _planner_starts(response) and time.monotonic() < give_up_at:
            if not self._told_to_wait:
                words = f"waiting up to {duration_text(_PLANNER_STARTS_WITHIN_S)}, Ctrl-C ends"
                say(f"evenkeel: the planner is starting; {words}", err=True)
                # A command may send several requests, and `--watch` sends one after the other.
                self._told_to_wait = True
            time.sleep(_pause_s(response))
            response = ask()
        self._told_to_wait = self._told_to_wait and _planner_starts(response)
        return response

    def _send(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        """Return the answer to a request.

        Raises:
            CliError: there was none, or it is a refusal.
        """
        try:
            response = self._wait_for_planner(lambda: self._ask_leader(method, path, **kwargs))
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise CliError(f"{self._url} is not a valid URL: {error}") from error
        except httpx.RequestError as error:
            raise self._unanswered(error) from error
        except ValueError as error:
            # An argument that is not valid text, or a number that JSON does not have.
            raise CliError(f"cannot send the request: {error}") from error
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise CliError(f"{self._url} refused: {self._token_words}", Exit.UNAUTHORIZED)
        if not response.is_success:
            raise _refusal(self._url, response)
        return response

    def _unanswered(self, error: httpx.RequestError) -> CliError:
        """Return the error of a request without an answer."""
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            return CliError(
                f"the certificate of {self._url} is not trusted: {error}; --ca-file names the file"
                " of its CA"
            )
        names = "--address names the REST address of a controller"
        if "WRONG_VERSION_NUMBER" in str(error):
            return CliError(f"{self._url}: the port speaks http, not https; {names}")
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return NotSent(
                f"no controller answers at {self._url} ({_connection_words(error)}); is"
                f" `evenkeel serve` running? {names}",
                Exit.UNAVAILABLE,
            )
        return CliError(f"no answer from {self._url}: {error}; {names}", Exit.UNAVAILABLE)

    def _object(self, response: httpx.Response) -> dict[str, Any]:
        answer = _json_object(response)
        if answer is None:
            raise CliError(
                f"{self._url} answered {response.status_code} without a JSON object; {_HINT}",
                Exit.REFUSED,
            )
        return answer


def checked_id(text: str, kind: str) -> str:
    """Return an id that may stand in a path; `kind` is what it should name.

    Raises:
        CliError: it is none. In a path, such as `..`, it could name something else.
    """
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text) is None:
        allowed = "a letter or digit, and then letters, digits and . _ -"
        raise CliError(f"{text!r} is no {kind} id: it has {allowed}")
    return text


def _trusting(ca_file: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file)
    except OSError as error:
        raise CliError(f"cannot use the CA file {ca_file}: {error}") from error


def _connection_words(error: httpx.TransportError) -> str:
    """Return why there is no connection, without the number of the system's error."""
    words = re.sub(r"^\[Errno -?\d+\] ", "", str(error))
    return words[:1].lower() + words[1:] or "timed out"


def _led_elsewhere(response: httpx.Response) -> bool:
    """Return True if another replica leads the deployment; the one that answered did nothing."""
    problem = _unavailable(response)
    return problem.get("reason") == Reason.NOT_LEADER and problem.get("leader") is not None


def _planner_starts(response: httpx.Response) -> bool:
    """Return True if the request was refused only because the planner is starting."""
    return _unavailable(response).get("reason") == Reason.PLANNER_STARTING


def _unavailable(response: httpx.Response) -> dict[str, Any]:
    """Return the problem details of a 503, or an empty dict."""
    is_503 = response.status_code == httpx.codes.SERVICE_UNAVAILABLE
    return (_json_object(response) or {}) if is_503 else {}


def _json_object(response: httpx.Response) -> dict[str, Any] | None:
    with suppress(ValueError):
        if isinstance(answer := response.json(), dict):
            return answer
    return None


def _pause_s(response: httpx.Response) -> float:
    told = response.headers.get("Retry-After", "")
    return min(float(told), _PLANNER_PAUSE_S) if told.isdecimal() else _PLANNER_PAUSE_S


def _refusal(url: str, response: httpx.Response) -> CliError:
    problem = _json_object(response) or {}
    text = f"{url} answered {response.status_code} without problem details; {_HINT}"
    if {"title", "detail"} <= problem.keys():
        because = f" ({problem['reason']})" if problem.get("reason") else ""
        text = f"{problem['title']}: {problem['detail']}{because}"
    code = {403: Exit.UNAUTHORIZED, 503: Exit.UNAVAILABLE}
    return CliError(text, code.get(response.status_code, Exit.REFUSED))


def read_token(token: str | None, token_file: Path | None, local_file: Path) -> str | None:
    """Return the token to send, or None if there is none.

    A file may hold several tokens in the controller's format; the first that may operate is used.

    Args:
        token: the token itself, which is preferred.
        token_file: a file with tokens, preferred over `local_file`.
        local_file: the token file of a controller on this machine; it may be missing.

    Raises:
        CliError: a file cannot be read.
    """
    if token is not None:
        return token
    path = token_file if token_file is not None else local_file
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        if token_file is None:
            return None
        raise CliError(f"there is no token file {path}") from None
    except OSError as error:
        raise CliError(f"cannot read the token file {path}: {error.strerror}") from error
    except UnicodeError as error:
        raise CliError(f"the token file {path} is not UTF-8 text: {error}") from error
    lines = [line.split("#", 1)[0].split() for line in text.splitlines()]
    secrets = [words for words in lines if words]
    operating = [words for words in secrets if not (len(words) >= 3 and words[1] == "read")]
    chosen = (operating or secrets)[:1]
    return chosen[0][-1] if chosen else None
