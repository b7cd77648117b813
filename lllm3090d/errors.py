"""The error taxonomy: every failure a person or a program can meet, defined once.

A failure has a stable code, an HTTP status, a D-Bus error name and an exit status; all surfaces render the
same :class:`LlmError`. The message says what happened and why, the hint what to do next, the details are
structured and JSON-serialisable. Texts may change between releases, codes may not.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

PROBLEM_TYPE_PREFIX = "urn:lllm3090:error:"
DBUS_ERROR_PREFIX = "org.lllm3090.Error."


class ExitStatus(enum.IntEnum):
    """Exit statuses of ``lllm3090ctl`` and ``lllm3090d``; see ``docs/reference/exit-statuses.md``."""

    OK = 0
    FAILURE = 1  # something went wrong inside; the message says what
    USAGE = 2  # the command line or the request is malformed
    UNREACHABLE = 3  # the daemon does not answer
    NOT_FOUND = 4  # no such model, file or instance, or the name is ambiguous
    REFUSED = 5  # it would not fit, or is in the way of something that runs
    ENGINE = 6  # the engine is missing, broken, or died
    BAD_CHECKPOINT = 7  # the model's files are damaged, incomplete or of an unknown kind
    TIMEOUT = 8
    FORBIDDEN = 9
    WARNED = 10  # doctor: something works less well than it could
    UNFIT = 11  # doctor: something does not work
    ALREADY_RUNNING = 69  # EX_UNAVAILABLE: another daemon holds the socket
    CONFIG = 78  # EX_CONFIG
    INTERRUPTED = 130


class ErrorCode(enum.StrEnum):
    """Stable codes. A new one needs a row in :data:`KINDS` and a line in ``docs/reference/errors.md``."""

    INTERNAL = "internal"
    NOT_JSON = "not_json"
    INVALID_REQUEST = "invalid_request"
    NO_SUCH_ROUTE = "no_such_route"
    FORBIDDEN_PEER = "forbidden_peer"
    UNKNOWN_MODEL = "unknown_model"
    AMBIGUOUS_MODEL = "ambiguous_model"
    NO_MODELS = "no_models"
    NO_SUCH_FILE = "no_such_file"
    MODELS_DIR_UNREADABLE = "models_dir_unreadable"
    LIBRARY_UNWATCHED = "library_unwatched"
    NOT_LOADED = "not_loaded"
    NO_SUCH_LOAD = "no_such_load"
    LOADED_DIFFERENTLY = "loaded_differently"
    BAD_CHECKPOINT = "bad_checkpoint"
    INCOMPLETE_CHECKPOINT = "incomplete_checkpoint"
    UNSUPPORTED_ARCHITECTURE = "unsupported_architecture"
    UNSUPPORTED_COMBINATION = "unsupported_combination"
    INSUFFICIENT_VRAM = "insufficient_vram"
    INSUFFICIENT_MEMORY = "insufficient_memory"
    CARD_UNREADABLE = "card_unreadable"
    CARD_AT_RISK = "card_at_risk"
    CARD_RELEASED = "card_released"
    ENGINE_NOT_FOUND = "engine_not_found"
    UNKNOWN_ENGINE = "unknown_engine"
    ENGINE_LOCKED = "engine_locked"
    ENGINE_CHOICE_IGNORED = "engine_choice_ignored"
    ENGINE_NOT_EXECUTABLE = "engine_not_executable"
    ENGINE_UNUSABLE = "engine_unusable"
    ENGINE_FAILED = "engine_failed"
    LOAD_TIMED_OUT = "load_timed_out"
    QUEUE_TIMED_OUT = "queue_timed_out"
    LOAD_CANCELLED = "load_cancelled"
    STOP_FAILED = "stop_failed"
    LOGS_UNAVAILABLE = "logs_unavailable"
    SETTINGS_INVALID = "settings_invalid"
    SOCKET_PATH_TOO_LONG = "socket_path_too_long"
    RUNTIME_DIR_UNUSABLE = "runtime_dir_unusable"
    STATE_UNUSABLE = "state_unusable"
    STATE_NEWER = "state_newer"
    ALREADY_RUNNING = "already_running"
    BUS_UNAVAILABLE = "bus_unavailable"
    LOGIND_UNAVAILABLE = "logind_unavailable"
    DBUS_UNAVAILABLE = "dbus_unavailable"
    UNIT_REFUSED = "unit_refused"
    SHUTTING_DOWN = "shutting_down"
    FILES_EXHAUSTED = "files_exhausted"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    WRONG_PURPOSE = "wrong_purpose"
    TOO_MANY_REQUESTS = "too_many_requests"
    MODEL_NOT_READY = "model_not_ready"
    MODEL_LATCHED = "model_latched"
    BODY_TOO_LARGE = "body_too_large"
    UNSUPPORTED_MEDIA = "unsupported_media"
    API_KEY_WRONG = "api_key_wrong"
    FOREIGN_ORIGIN = "foreign_origin"
    GATEWAY_UNAVAILABLE = "gateway_unavailable"


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """One row of the taxonomy."""

    code: ErrorCode
    title: str
    http_status: int
    exit_status: ExitStatus

    @property
    def dbus_name(self) -> str:
        """The D-Bus error name, ``org.lllm3090.Error.`` and the code in CamelCase."""
        return DBUS_ERROR_PREFIX + "".join(part.capitalize() for part in self.code.split("_"))


def _kinds(*rows: tuple[ErrorCode, str, int, ExitStatus]) -> Mapping[ErrorCode, ErrorKind]:
    return MappingProxyType({row[0]: ErrorKind(*row) for row in rows})


KINDS: Mapping[ErrorCode, ErrorKind] = _kinds(
    (ErrorCode.INTERNAL, "Internal error", 500, ExitStatus.FAILURE),
    (ErrorCode.NOT_JSON, "The request body is not JSON", 400, ExitStatus.USAGE),
    (ErrorCode.INVALID_REQUEST, "The request is not valid", 422, ExitStatus.USAGE),
    (ErrorCode.NO_SUCH_ROUTE, "No such address", 404, ExitStatus.USAGE),
    (ErrorCode.FORBIDDEN_PEER, "This socket belongs to another user", 403, ExitStatus.FORBIDDEN),
    (ErrorCode.UNKNOWN_MODEL, "No such model", 404, ExitStatus.NOT_FOUND),
    (ErrorCode.AMBIGUOUS_MODEL, "The name fits several models", 409, ExitStatus.NOT_FOUND),
    (ErrorCode.NO_MODELS, "There are no models", 404, ExitStatus.NOT_FOUND),
    (ErrorCode.NO_SUCH_FILE, "There is no such file", 404, ExitStatus.NOT_FOUND),
    (ErrorCode.MODELS_DIR_UNREADABLE, "The models directory cannot be read", 503, ExitStatus.CONFIG),
    (ErrorCode.LIBRARY_UNWATCHED, "The models directory is not watched", 503, ExitStatus.FAILURE),
    (ErrorCode.NOT_LOADED, "The model is not loaded", 404, ExitStatus.NOT_FOUND),
    (ErrorCode.NO_SUCH_LOAD, "No such load", 404, ExitStatus.NOT_FOUND),
    (ErrorCode.LOADED_DIFFERENTLY, "The model is loaded with other values", 409, ExitStatus.REFUSED),
    (ErrorCode.BAD_CHECKPOINT, "The model file is damaged", 422, ExitStatus.BAD_CHECKPOINT),
    (ErrorCode.INCOMPLETE_CHECKPOINT, "Parts of the model are missing", 422, ExitStatus.BAD_CHECKPOINT),
    (ErrorCode.UNSUPPORTED_ARCHITECTURE, "Unsupported kind of model", 422, ExitStatus.BAD_CHECKPOINT),
    (ErrorCode.UNSUPPORTED_COMBINATION, "This cannot be planned", 422, ExitStatus.REFUSED),
    (ErrorCode.INSUFFICIENT_VRAM, "It does not fit on the card", 507, ExitStatus.REFUSED),
    (ErrorCode.INSUFFICIENT_MEMORY, "It does not fit", 507, ExitStatus.REFUSED),
    (ErrorCode.CARD_UNREADABLE, "The card's memory cannot be read", 503, ExitStatus.FAILURE),
    (ErrorCode.CARD_AT_RISK, "The card has reported an error", 503, ExitStatus.FAILURE),
    (ErrorCode.CARD_RELEASED, "The card is released", 409, ExitStatus.REFUSED),
    (ErrorCode.ENGINE_NOT_FOUND, "No llama-server was found", 503, ExitStatus.ENGINE),
    (ErrorCode.UNKNOWN_ENGINE, "No such engine is offered", 404, ExitStatus.NOT_FOUND),
    (ErrorCode.ENGINE_LOCKED, "The environment decides on the engine", 409, ExitStatus.REFUSED),
    (ErrorCode.ENGINE_CHOICE_IGNORED, "The choice of an engine is ignored", 503, ExitStatus.ENGINE),
    (ErrorCode.ENGINE_NOT_EXECUTABLE, "llama-server cannot be executed", 503, ExitStatus.ENGINE),
    (ErrorCode.ENGINE_UNUSABLE, "This llama-server cannot be used", 503, ExitStatus.ENGINE),
    (ErrorCode.ENGINE_FAILED, "The engine ended", 502, ExitStatus.ENGINE),
    (ErrorCode.LOAD_TIMED_OUT, "The model did not become ready in time", 504, ExitStatus.TIMEOUT),
    (ErrorCode.QUEUE_TIMED_OUT, "There was no room in time", 503, ExitStatus.REFUSED),
    (ErrorCode.LOAD_CANCELLED, "The load was cancelled", 409, ExitStatus.FAILURE),
    (ErrorCode.STOP_FAILED, "The unit could not be stopped", 504, ExitStatus.TIMEOUT),
    (ErrorCode.LOGS_UNAVAILABLE, "The journal cannot be read", 503, ExitStatus.FAILURE),
    (ErrorCode.SETTINGS_INVALID, "The settings are not valid", 422, ExitStatus.CONFIG),
    (ErrorCode.SOCKET_PATH_TOO_LONG, "A socket path is too long", 500, ExitStatus.CONFIG),
    (ErrorCode.RUNTIME_DIR_UNUSABLE, "The runtime directory cannot be used", 500, ExitStatus.CONFIG),
    (ErrorCode.STATE_UNUSABLE, "What was learnt cannot be kept", 503, ExitStatus.FAILURE),
    (ErrorCode.STATE_NEWER, "What was learnt is of a newer release", 503, ExitStatus.CONFIG),
    (ErrorCode.ALREADY_RUNNING, "Another daemon is running", 409, ExitStatus.ALREADY_RUNNING),
    (ErrorCode.BUS_UNAVAILABLE, "The user's systemd cannot be reached", 503, ExitStatus.FAILURE),
    (ErrorCode.LOGIND_UNAVAILABLE, "Sleep is not noticed, or not delayed", 503, ExitStatus.FAILURE),
    (ErrorCode.DBUS_UNAVAILABLE, "The D-Bus interface is not offered", 503, ExitStatus.FAILURE),
    (ErrorCode.UNIT_REFUSED, "systemd refused the unit", 502, ExitStatus.FAILURE),
    (ErrorCode.SHUTTING_DOWN, "The daemon is stopping", 503, ExitStatus.FAILURE),
    (ErrorCode.FILES_EXHAUSTED, "No file descriptors are left", 503, ExitStatus.FAILURE),
    (ErrorCode.CONTEXT_LENGTH_EXCEEDED, "The prompt is too long", 400, ExitStatus.USAGE),
    (ErrorCode.WRONG_PURPOSE, "The model does not serve this", 400, ExitStatus.USAGE),
    (ErrorCode.TOO_MANY_REQUESTS, "Too many requests wait", 429, ExitStatus.REFUSED),
    (ErrorCode.MODEL_NOT_READY, "The model is not ready", 503, ExitStatus.REFUSED),
    (ErrorCode.MODEL_LATCHED, "The model stays down", 503, ExitStatus.REFUSED),
    (ErrorCode.BODY_TOO_LARGE, "The request is too large", 413, ExitStatus.USAGE),
    (ErrorCode.UNSUPPORTED_MEDIA, "The request is of a kind that is not read", 415, ExitStatus.USAGE),
    (ErrorCode.API_KEY_WRONG, "The key is missing or wrong", 401, ExitStatus.FORBIDDEN),
    (ErrorCode.FOREIGN_ORIGIN, "A page from elsewhere must not ask", 403, ExitStatus.FORBIDDEN),
    (ErrorCode.GATEWAY_UNAVAILABLE, "The gateway's address cannot be had", 503, ExitStatus.CONFIG),
)


class LlmError(Exception):
    """A failure of the taxonomy.

    Args:
        code: the row in :data:`KINDS`.
        message: what happened and why, one sentence or more, for a person.
        hint: what to do next, preferably a command; None only where nothing can be done.
        details: structured facts, JSON-serialisable, for programs.
    """

    def __init__(self, code: ErrorCode, message: str, *, hint: str | None = None, **details: Any) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        self.details: Mapping[str, Any] = MappingProxyType(dict(details))

    @property
    def kind(self) -> ErrorKind:
        """The row of the taxonomy."""
        return KINDS[self.code]

    def problem(self) -> dict[str, Any]:
        """The RFC 9457 problem document; our code, exit status, hint and details are extension members."""
        kind = self.kind
        document: dict[str, Any] = {
            "type": PROBLEM_TYPE_PREFIX + self.code,
            "title": kind.title,
            "status": kind.http_status,
            "detail": self.message,
            "code": str(self.code),
            "exit_status": int(kind.exit_status),
        }
        if self.hint is not None:
            document["hint"] = self.hint
        if self.details:
            document["details"] = dict(self.details)
        return document
