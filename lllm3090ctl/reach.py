"""The gateway as this client reaches it: its address, its key, and whether it answers."""

from __future__ import annotations

import http.client
import os
from typing import NamedTuple
from urllib.parse import urlsplit

from lllm3090ctl.client import Client
from lllm3090ctl.documents import Document, excerpt, parse
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import Failure, as_failure, own_failure

KEY_VARIABLE = "LLLM3090_API_KEY"
# Clients insist on a key; where none is asked for, any will do.
NO_KEY = "not-needed"
LONGEST_KEY = 4096
HEALTH_TIMEOUT_S = 10.0
LARGEST_ERROR_BYTES = 1 << 20
# Exit statuses by the HTTP status of a failure; one that is not here is FAILURE.
_EXITS = {
    400: ExitStatus.USAGE,
    401: ExitStatus.FORBIDDEN,
    403: ExitStatus.FORBIDDEN,
    404: ExitStatus.NOT_FOUND,
    409: ExitStatus.REFUSED,
    413: ExitStatus.USAGE,
    415: ExitStatus.USAGE,
    422: ExitStatus.USAGE,
    429: ExitStatus.REFUSED,
    500: ExitStatus.ENGINE,
    502: ExitStatus.ENGINE,
    503: ExitStatus.REFUSED,
    504: ExitStatus.TIMEOUT,
    507: ExitStatus.REFUSED,
}


class Gateway(NamedTuple):
    """Where it listens.

    Attributes:
        url: without a path, such as ``http://127.0.0.1:1919``.
        host: to connect to.
        port: likewise.
        key: to send; a placeholder where nobody gave one.
    """

    url: str
    host: str
    port: int
    key: str


def gateway(client: Client, key: str | None) -> Gateway | None:
    """The gateway as ``status`` tells of it; None where it does not listen. Raises :class:`Failure`."""
    view = client.status().maybe_child("gateway")
    address = view.maybe_text("address") if view is not None else None
    if address is None:
        return None
    parts = urlsplit(address)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(parts.hostname or "", parts.hostname or "")  # noqa: S104 - any
    shown = f"[{host}]" if ":" in host else host
    return Gateway(f"http://{shown}:{parts.port}", host, parts.port or 80, key or NO_KEY)


def required(client: Client, key: str | None) -> Gateway:
    """The gateway, once it has let this key through.

    Raises:
        Failure: ``gateway_off`` or the daemon's reason where it does not listen, ``gateway_unreachable``,
            ``api_key_wrong``.
    """
    found = gateway(client, key)
    if found is None:
        raise off(client)
    connection = http.client.HTTPConnection(found.host, found.port, timeout=HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", "/health", headers={"Authorization": f"Bearer {found.key}"})
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise refused(response)
        response.read()
    except (OSError, http.client.HTTPException) as error:
        raise unreachable(found, error) from error
    finally:
        connection.close()
    return found


def off(client: Client) -> Failure:
    """Why it does not listen."""
    view = client.status().maybe_child("gateway")
    problem = view.maybe_child("problem") if view is not None else None
    if problem is not None:
        return as_failure(problem.members)
    return own_failure(
        "gateway_off",
        "The gateway is off",
        "The daemon serves no address for other programs.",
        exit_status=ExitStatus.CONFIG,
        hint="Set gateway = true in ~/.config/lllm3090/config.toml, then: systemctl --user reload lllm3090d",
    )


def unreachable(where: Gateway, error: Exception) -> Failure:
    """The failure of a gateway that does not answer."""
    return own_failure(
        "gateway_unreachable",
        "The gateway does not answer",
        f"The daemon says that its gateway listens on {where.url}, where nobody answers as it does:"
        f" {error or type(error).__name__}",
        exit_status=ExitStatus.UNREACHABLE,
        hint="See whether the daemon runs: lllm3090ctl status",
    )


def refused(response: http.client.HTTPResponse) -> Failure:
    """What an answer other than 200 says, of the gateway or of an engine."""
    body = response.read(LARGEST_ERROR_BYTES)
    try:
        error = parse(body).maybe_child("error")
    except Failure:
        error = None
    if error is None:
        return own_failure(
            "request_failed",
            "The request failed",
            f"The answer has HTTP status {response.status} and begins with {excerpt(body)}.",
            exit_status=_EXITS.get(response.status, ExitStatus.FAILURE),
        )
    return failed(error, response.status)


def failed(error: Document, status: int) -> Failure:
    """The failure in an ``error`` of the OpenAI API.

    Args:
        error: with ``message``; of the gateway also ``code`` and ``hint``.
        status: of HTTP; 500 where it came in a stream that had begun.
    """
    code, hint, message = (error.members.get(name) for name in ("code", "hint", "message"))
    detail = message if isinstance(message, str) else "no reason was given"
    if isinstance(hint, str):
        detail = detail.removesuffix(hint).strip()
    exit_status = _EXITS.get(status, ExitStatus.FAILURE)
    made = own_failure(
        "request_failed",
        "The request failed",
        detail,
        exit_status=exit_status,
        hint=hint if isinstance(hint, str) else None,
    )
    return Failure({**made.problem, "code": code}, exit_status) if isinstance(code, str) else made


def key(path: str | None) -> str | None:
    """The person's key: of a file, else of the environment; None where there is none.

    Raises:
        Failure: ``key_unreadable`` for a file that holds none.
    """
    if path is None:
        text, where = os.environ.get(KEY_VARIABLE, "").strip(), f"The variable {KEY_VARIABLE}"
        if not text:
            return None
    else:
        where = f"The file {path}"
        try:
            with open(path, encoding="ascii") as file:  # noqa: PTH123 - no pathlib, for speed
                text = file.read(LONGEST_KEY + 1).strip()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not plain text"
            raise _no_key(f"{where} cannot be read: {why or error}") from error
    if not text or len(text) > LONGEST_KEY or not text.isascii() or not text.isprintable() or " " in text:
        raise _no_key(f"{where} holds no key: one word of printable characters.")
    return text


def _no_key(detail: str) -> Failure:
    return own_failure(
        "key_unreadable",
        "There is no key",
        detail,
        exit_status=ExitStatus.CONFIG,
        hint="Give a file with nothing but the key in it, that only you can read.",
    )
