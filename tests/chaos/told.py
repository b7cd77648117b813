"""What the daemon says, over its socket; no model of its own, so that a wrong one is not believed."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 4.0


@dataclass(frozen=True, slots=True)
class Instance:
    """An instance as it is told."""

    name: str
    run: str
    state: str
    unit: str
    main_pid: int
    invocation: str
    endpoint: str
    retries: bool
    retry_in_s: float | None = None
    cause: str = ""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A promise as it is told."""

    run: str
    model: str
    where: str
    state: str
    charged: int
    held: int | None


@dataclass(frozen=True, slots=True)
class Told:
    """One look through the eyes of the daemon; sizes are bytes, None where it says that it cannot tell."""

    instances: tuple[Instance, ...]
    reservations: tuple[Reservation, ...]
    card_problem: str | None
    used: int | None
    foreign: int | None
    charged: int
    quarantined: int
    pending: tuple[str, ...] = ()


class UnixHttp(http.client.HTTPConnection):
    """HTTP over a Unix socket, with a limit on every wait."""

    def __init__(self, path: str | Path, timeout_s: float = TIMEOUT_S) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = str(path)

    def connect(self) -> None:
        """Connect to the socket."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def get(path: str | Path, target: str, timeout_s: float = TIMEOUT_S) -> bytes:
    """One question. Raises OSError or HTTPException where it is not answered with 200."""
    connection = UnixHttp(path, timeout_s)
    try:
        connection.request("GET", target)
        answer = connection.getresponse()
        body = answer.read()
    finally:
        connection.close()
    if answer.status != 200:
        raise http.client.HTTPException(f"{target}: {answer.status} {body[:300]!r}")
    return body


def answers(path: str | Path, timeout_s: float = 0.5) -> bool:
    """Whether an engine says that it serves."""
    try:
        get(path, "/health", timeout_s)
    except (OSError, http.client.HTTPException):
        return False
    return True


def ask(control_socket: Path) -> Told:
    """What it says now. Raises OSError or HTTPException where it does not answer."""
    instances = json.loads(get(control_socket, "/v1/instances"))
    cards = json.loads(get(control_socket, "/v1/gpus"))
    return parse(instances, cards["gpus"][0])


def events_since(control_socket: Path, seq: int) -> list[dict[str, Any]]:
    """What happened since. Raises OSError or HTTPException where it does not answer."""
    return [json.loads(line) for line in get(control_socket, f"/v1/events?since={seq}").splitlines()]


def newest_event(control_socket: Path) -> int:
    """The number of the newest event; 0 without any. Raises OSError or HTTPException where it does not answer."""
    lines = get(control_socket, "/v1/events?last=1").splitlines()
    return int(json.loads(lines[-1])["seq"]) if lines else 0


def parse(instances: Mapping[str, Any], card: Mapping[str, Any]) -> Told:
    """Both answers as one."""
    problem = card.get("problem")
    reading = card.get("reading") or {}
    return Told(
        instances=tuple(_instance(each) for each in instances["instances"]),
        reservations=tuple(
            Reservation(
                each["run"],
                each["model"],
                each["where"],
                each["state"],
                each["charged_bytes"],
                each.get("held_bytes"),
            )
            for each in card["reservations"]
        ),
        card_problem=None if problem is None else str(problem.get("code")),
        used=reading.get("used_bytes"),
        foreign=card.get("foreign_bytes"),
        charged=card["charged_bytes"],
        quarantined=card["quarantined_bytes"],
        pending=tuple(each["name"] for each in instances.get("pending", ())),
    )


def _instance(each: Mapping[str, Any]) -> Instance:
    failure = each.get("failure") or {}
    return Instance(
        name=each["name"],
        run=each["run"],
        state=each["state"],
        unit=each["unit"],
        main_pid=each.get("main_pid") or 0,
        invocation=each.get("invocation_id") or "",
        endpoint=each["endpoint"],
        # Of one whose start waits for room there is no time; its attempt says that there is to be one.
        retries=each.get("retry_in_s") is not None or bool(each.get("attempt")),
        retry_in_s=each.get("retry_in_s"),
        cause=str((failure.get("details") or failure).get("cause", "")),
    )
