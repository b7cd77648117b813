"""HTTP to the daemon over its Unix socket: a connection for each request, every fault a :class:`Failure`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from types import TracebackType
from urllib.parse import quote

from lllm3090ctl.documents import Document, excerpt, parse
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import Failure, as_failure, bad_answer, own_failure
from lllm3090ctl.text import named

SUN_PATH_BYTES = 108  # unix(7), with the final NUL
ANSWER_TIMEOUT_S = 30.0  # a socket-activated daemon has to start first
PLAN_TIMEOUT_S = (
    120.0  # until a plan stands: reads the checkpoint, may have to ask a new engine build what it can do
)
UNLOAD_TIMEOUT_S = (
    300.0  # SIGTERM, SIGKILL and the return of the memory, each with a limit of its own in the daemon
)
LARGEST_ANSWER_BYTES = 64 << 20
LARGEST_LINE_BYTES = 8 << 20
READ_BYTES = 1 << 16
CONNECTION_LOST = (
    ConnectionResetError,
    BrokenPipeError,
    http.client.RemoteDisconnected,
    http.client.IncompleteRead,
)


def default_socket_path() -> str:
    """``control.sock`` in ``$LLLM3090_RUNTIME_DIR``, else in ``lllm3090d`` in ``$XDG_RUNTIME_DIR``."""
    chosen = os.environ.get("LLLM3090_RUNTIME_DIR")
    if chosen:
        return os.path.join(os.path.expanduser(chosen), "control.sock")  # noqa: PTH111, PTH118 - no pathlib, for speed
    base = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    return f"{base}/lllm3090d/control.sock"


class UnixConnection(http.client.HTTPConnection):
    """An HTTP connection whose transport is a Unix socket.

    Attributes:
        transport: the connected socket; http.client forgets ``sock`` when it has read an answer's head.
    """

    transport: socket.socket

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path
        self._timeout_s = timeout_s

    def connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # A non-blocking connect fails at once when the backlog is full; SO_SNDTIMEO waits, with a limit.
            whole_s = int(self._timeout_s)
            limit = struct.pack("ll", whole_s, int((self._timeout_s - whole_s) * 1e6) or int(whole_s == 0))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            connection.connect(self._path)
            connection.settimeout(self._timeout_s)
        except BaseException:
            connection.close()
            raise
        self.sock = self.transport = connection


class Stream:
    """The lines of an NDJSON answer, each as it arrives. Iterate once, inside ``with``."""

    def __init__(
        self, client: Client, connection: UnixConnection, response: http.client.HTTPResponse
    ) -> None:
        self._client = client
        self._connection = connection
        self._response = response

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._response.close()
        self._connection.close()

    def __iter__(self) -> Iterator[Document]:
        """Each line.

        Raises:
            Failure: ``connection_lost`` when the stream breaks off, ``bad_answer`` for anything but JSON
                objects, or what the daemon reports: once a stream has begun, a failure is its last line, an object
                with nothing but a ``problem``.
        """
        pending = b""
        while piece := self._read():
            *lines, pending = (pending + piece).split(b"\n")
            for line in lines:
                if line.strip():
                    yield _line(line)
            if len(pending) > LARGEST_LINE_BYTES:
                raise bad_answer("A line of the answer does not end.")
        if pending.strip():
            yield _line(pending)

    def _read(self) -> bytes:
        try:
            piece = self._response.read1(READ_BYTES)
        except CONNECTION_LOST as error:
            raise self._client.lost() from error
        except http.client.HTTPException as error:
            raise bad_answer(f"The stream breaks the rules of HTTP ({type(error).__name__}).") from error
        except OSError as error:
            raise self._client.lost(error) from error
        if not piece and self._response.length:  # http.client reports a short body only to read()
            raise self._client.lost()
        return piece


class Client:
    """The control API as methods. Each raises :class:`Failure` for whatever goes wrong.

    Args:
        path: the daemon's control socket.
        timeout_s: how long to wait for an answer; None for the default of each request. Pauses between the
            lines of a stream have no limit.
        command: how this client was called, for messages that name the next command.
    """

    def __init__(self, path: str, timeout_s: float | None = None, command: str = "lllm3090ctl") -> None:
        self.path = path
        self.shown_path = named(path)
        self.command = command
        self._timeout_s = timeout_s

    def version(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Document:
        """``GET /v1/version``."""
        return self._ask("GET", "/v1/version", timeout_s=timeout_s)

    def status(self, timeout_s: float = ANSWER_TIMEOUT_S) -> Document:
        """``GET /v1/status``."""
        return self._ask("GET", "/v1/status", timeout_s=timeout_s)

    def models(self, with_catalogue: bool = False) -> Document:
        """``GET /v1/models``; makes the plans that are not known yet."""
        target = "/v1/models?catalogue=1" if with_catalogue else "/v1/models"
        return self._ask("GET", target, timeout_s=PLAN_TIMEOUT_S)

    def instances(self) -> Document:
        """``GET /v1/instances``."""
        return self._ask("GET", "/v1/instances")

    def gpus(self) -> Document:
        """``GET /v1/gpus``."""
        return self._ask("GET", "/v1/gpus")

    def explain(self, name: str) -> Document:
        """``GET /v1/models/{name}/explain``; reads the log of its engine."""
        return self._ask("GET", f"/v1/models/{quote(name, safe='')}/explain", timeout_s=PLAN_TIMEOUT_S)

    def engines(self) -> Document:
        """``GET /v1/engines``; asks each build that is not known yet."""
        return self._ask("GET", "/v1/engines", timeout_s=PLAN_TIMEOUT_S)

    def engine(self, name: str) -> Document:
        """``GET /v1/engines/{name}``."""
        return self._ask("GET", f"/v1/engines/{quote(name, safe='')}", timeout_s=PLAN_TIMEOUT_S)

    def select_engine(self, name: str | None) -> Document:
        """``POST /v1/engines/select``; None leaves the choice to the daemon."""
        return self._ask("POST", "/v1/engines/select", {"engine": name}, PLAN_TIMEOUT_S)

    def inspect(self, body: Mapping[str, object]) -> Document:
        """``POST /v1/inspect``."""
        return self._ask("POST", "/v1/inspect", body, PLAN_TIMEOUT_S)

    def plan(self, body: Mapping[str, object]) -> Document:
        """``POST /v1/plan``."""
        return self._ask("POST", "/v1/plan", body, PLAN_TIMEOUT_S)

    def unload(self, name: str, drain_s: float | None = None, force: bool = False) -> Document:
        """``POST /v1/unload``; returns when the memory is back."""
        body: dict[str, object] = {"model": name}
        body |= {"drain_s": drain_s} if drain_s is not None else {}
        body |= {"force": True} if force else {}
        return self._ask("POST", "/v1/unload", body, UNLOAD_TIMEOUT_S + (drain_s or 0.0))

    def release(self, until_resume: bool) -> Document:
        """``POST /v1/release``; returns when the memory is back."""
        return self._ask("POST", "/v1/release", {"until_resume": until_resume}, UNLOAD_TIMEOUT_S)

    def resume(self) -> Document:
        """``POST /v1/resume``."""
        return self._ask("POST", "/v1/resume", {})

    def pin(self, name: str, pinned: bool) -> Document:
        """``POST /v1/models/{name}/pin``."""
        return self._ask("POST", f"/v1/models/{quote(name, safe='')}/pin", {"pinned": pinned})

    def reset(self, name: str) -> Document:
        """``POST /v1/models/{name}/reset``."""
        return self._ask("POST", f"/v1/models/{quote(name, safe='')}/reset", {})

    def autoload(self) -> Document:
        """``GET /v1/autoload``."""
        return self._ask("GET", "/v1/autoload")

    def mark_autoload(self, name: str, marked: bool) -> Document:
        """``POST /v1/models/{name}/autoload``."""
        return self._ask("POST", f"/v1/models/{quote(name, safe='')}/autoload", {"autoload": marked})

    def keys(self) -> Document:
        """``GET /v1/keys``."""
        return self._ask("GET", "/v1/keys")

    def add_key(self, name: str) -> Document:
        """``POST /v1/keys/add``."""
        return self._ask("POST", "/v1/keys/add", {"name": name})

    def remove_key(self, name: str) -> Document:
        """``POST /v1/keys/remove``."""
        return self._ask("POST", "/v1/keys/remove", {"name": name})

    def cancel(self, token: str) -> Document:
        """``POST /v1/cancel``."""
        return self._ask("POST", "/v1/cancel", {"token": token})

    def load(self, body: Mapping[str, object]) -> Stream:
        """``POST /v1/load``."""
        return self._stream("POST", "/v1/load", body, PLAN_TIMEOUT_S)

    def logs(self, name: str, lines: int, follow: bool, since: str | None = None) -> Stream:
        """``GET /v1/instances/{name}/logs``."""
        target = f"/v1/instances/{quote(name, safe='')}/logs?lines={lines}&follow={follow:d}"
        return self._stream("GET", target + (f"&since={quote(since, safe='')}" if since else ""))

    def history(self, name: str, runs: int) -> Document:
        """``GET /v1/models/{name}/history``."""
        return self._ask("GET", f"/v1/models/{quote(name, safe='')}/history?runs={runs}")

    def events(self, since: str, follow: bool, last: int | None = None) -> Stream:
        """``GET /v1/events``."""
        target = f"/v1/events?since={quote(since, safe='')}&follow={follow:d}"
        return self._stream("GET", target + (f"&last={last}" if last is not None else ""))

    def requests(self, name: str | None, since: str | None, last: int, follow: bool) -> Stream:
        """``GET /v1/requests``."""
        target = f"/v1/requests?last={last}&follow={follow:d}"
        target += f"&model={quote(name, safe='')}" if name is not None else ""
        return self._stream("GET", target + (f"&since={quote(since, safe='')}" if since else ""))

    def lost(self, error: OSError | None = None) -> Failure:
        """The failure of a connection that broke off."""
        why = f" ({error.strerror or error})" if error else ""
        return own_failure(
            "connection_lost",
            "The daemon went away",
            f"The daemon ended the connection before it had finished its answer{why}.",
            exit_status=ExitStatus.UNREACHABLE,
            hint="Models that run go on running. See what happened: journalctl --user-unit lllm3090d -n 20",
        )

    def ended(self) -> Failure:
        """The failure of a stream that should go on for as long as the daemon does."""
        return own_failure(
            "connection_lost",
            "The daemon went away",
            "The daemon ended the stream: it stops, or more came than this client read.",
            exit_status=ExitStatus.UNREACHABLE,
            hint=f"Models that run go on running. See whether the daemon runs: {self.command} status",
        )

    def _ask(
        self,
        method: str,
        target: str,
        body: Mapping[str, object] | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> Document:
        connection, response = self._exchange(method, target, body, self._timeout_s or timeout_s)
        try:
            return parse(self._body(response))
        finally:
            connection.close()

    def _stream(
        self,
        method: str,
        target: str,
        body: Mapping[str, object] | None = None,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> Stream:
        connection, response = self._exchange(method, target, body, self._timeout_s or timeout_s)
        if not response.chunked and response.length is None:
            connection.close()
            raise bad_answer(
                "The stream does not say where it ends, so nobody could tell its end from a loss."
            )
        # The head of the answer is there; when the lines come is the daemon's affair (a model may load for
        # minutes, a log may be silent for days).
        connection.transport.settimeout(None)
        return Stream(self, connection, response)

    def _exchange(
        self, method: str, target: str, body: Mapping[str, object] | None, timeout_s: float
    ) -> tuple[UnixConnection, http.client.HTTPResponse]:
        """Send a request, read the head of its answer; an error status is raised as what it describes."""
        connection = self._connect(timeout_s)
        try:
            response = self._answer(connection, method, target, body, timeout_s)
            if response.status != http.client.OK:
                raise self._refusal(response)
        except BaseException:
            connection.close()
            raise
        return connection, response

    def _connect(self, timeout_s: float) -> UnixConnection:
        encoded = os.fsencode(self.path)
        if len(encoded) >= SUN_PATH_BYTES:
            raise own_failure(
                "socket_path_too_long",
                "A socket path is too long",
                f"The path of the control socket has {len(encoded)} bytes, a Unix socket's path has at most"
                f" {SUN_PATH_BYTES - 1}: {self.shown_path}",
                exit_status=ExitStatus.CONFIG,
                hint="Set LLLM3090_RUNTIME_DIR to a shorter directory, for the daemon and for lllm3090ctl.",
            )
        connection = UnixConnection(self.path, timeout_s)
        try:
            connection.connect()
        except PermissionError as error:
            raise own_failure(
                "socket_forbidden",
                "This socket belongs to another user",
                f"The control socket {self.shown_path} may not be opened by this user (uid {os.getuid()}).",
                exit_status=ExitStatus.FORBIDDEN,
                hint="The daemon serves one user each. Start your own: systemctl --user start lllm3090d",
            ) from error
        except (TimeoutError, BlockingIOError) as error:
            raise self._silent(timeout_s) from error
        except OSError as error:
            from lllm3090ctl.diagnosis import unreachable  # noqa: PLC0415 - only needed when there is no daemon

            raise unreachable(self.path, error) from error
        return connection

    def _answer(
        self,
        connection: UnixConnection,
        method: str,
        target: str,
        body: Mapping[str, object] | None,
        timeout_s: float,
    ) -> http.client.HTTPResponse:
        headers = {"Accept": "application/json", "Connection": "close"}
        payload = None
        if body is not None:
            headers["Content-Type"] = "application/json"
            payload = json.dumps(body).encode()
        try:
            # The daemon may have answered before it read the whole request; if not, getresponse() raises.
            with contextlib.suppress(BrokenPipeError):
                connection.request(method, target, body=payload, headers=headers)
            return connection.getresponse()
        except TimeoutError as error:
            raise self._silent(timeout_s) from error
        except CONNECTION_LOST as error:
            raise self.lost() from error
        except http.client.HTTPException as error:
            raise bad_answer(
                f"What listens on {self.shown_path} does not speak HTTP ({type(error).__name__})."
            ) from error
        except OSError as error:
            raise self.lost(error) from error

    def _refusal(self, response: http.client.HTTPResponse) -> Failure:
        body = self._body(response)
        if not (response.getheader("Content-Type") or "").startswith(
            ("application/problem+json", "application/json")
        ):
            return bad_answer(
                f"The daemon answered with HTTP status {response.status} and no problem document;"
                f" the answer begins with {excerpt(body)}."
            )
        return as_failure(parse(body).members)

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        try:
            body = response.read(LARGEST_ANSWER_BYTES + 1)
        except TimeoutError as error:
            raise self._silent(None) from error
        except CONNECTION_LOST as error:
            raise self.lost() from error
        except http.client.HTTPException as error:
            raise bad_answer(f"The answer breaks the rules of HTTP ({type(error).__name__}).") from error
        except OSError as error:
            raise self.lost(error) from error
        if len(body) > LARGEST_ANSWER_BYTES:
            raise bad_answer(f"The answer is longer than {LARGEST_ANSWER_BYTES} bytes.")
        if response.length:  # read(amount) returns a short body without complaint
            raise self.lost()
        return body

    def _silent(self, timeout_s: float | None) -> Failure:
        limit = "in time" if timeout_s is None else f"within {timeout_s:g} s"
        return own_failure(
            "daemon_silent",
            "The daemon does not answer",
            f"The daemon listens on {self.shown_path} but did not answer {limit}.",
            exit_status=ExitStatus.UNREACHABLE,
            hint="See what it is doing: journalctl --user-unit lllm3090d -n 20\n"
            "Wait longer: lllm3090ctl --timeout SECONDS ...\n"
            "Restart it (models go on running): systemctl --user restart lllm3090d",
        )


def _line(raw: bytes) -> Document:
    line = parse(raw)
    if line.members.keys() == {"problem"}:
        raise as_failure(line.child("problem").members)
    return line
