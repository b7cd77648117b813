"""Who may ask: what of a request's head lets nobody through but programs of this machine and those with a key. Pure.

A loopback port is open to every page that a browser shows. A page's request has an ``Origin`` that is not ours, or
``Sec-Fetch-Site``; one that was lured here by a name that now resolves to 127.0.0.1 has that name in ``Host``. A body
of a type that needs no question before (``text/plain``) makes no difference: its sender has an ``Origin`` all the same.

Where keys are asked for, an address of this machine may be in ``Host`` too: no name was resolved for it, and a page has
no key. What browsers do not send to an address without encryption (``Sec-Fetch-Site``) then matters to nobody.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import urllib.parse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lllm3090d.errors import ErrorCode, LlmError

LOOPBACK_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
USUAL_HEADERS = "authorization, content-type"
# What a page may read of an answer beside what every page may.
EXPOSED_HEADERS = "x-request-id, retry-after, x-should-retry"
# A person who types an address, and a page of ours. Whatever else it says, it says that a page has asked.
OWN_SITES = frozenset({"none", "same-origin"})


@dataclass(frozen=True, slots=True)
class Rules:
    """Whom to let through.

    Attributes:
        hosts: further names of this machine, in lower case.
        origins: pages that may ask, such as ``http://localhost:3000``; ``*`` for all.
        key_digests: SHA-256 of the keys, hexadecimal; empty where none is asked for.
        needs_key: one is asked for even where there is none, so that nobody is let in.
    """

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    key_digests: tuple[str, ...] = ()
    needs_key: bool = False


def check(headers: Mapping[str, str], rules: Rules) -> None:
    """Let a request through.

    Args:
        headers: of the request, looked up without regard to case.
        rules: whom to let through.

    Raises:
        LlmError: FOREIGN_ORIGIN, API_KEY_WRONG.
    """
    check_place(headers, rules)
    if (rules.key_digests or rules.needs_key) and not _has_key(headers, rules.key_digests):
        raise LlmError(
            ErrorCode.API_KEY_WRONG,
            "The gateway asks for a key, and none or another one was sent.",
            hint="Send it as Authorization: Bearer KEY or as x-api-key.",
        )


def check_place(headers: Mapping[str, str], rules: Rules) -> None:
    """The same without the key, which browsers do not send with what they ask before. Raises FOREIGN_ORIGIN."""
    host = host_name(headers.get("Host", ""))
    known = host in LOOPBACK_HOSTS or host in rules.hosts or (rules.key_digests and is_address(host))
    if not known:
        raise _foreign(f"The Host header names {host[:100]!r}, not this machine.", "gateway_hosts")
    origin = headers.get("Origin")
    if origin is not None:
        if not allows(origin, rules, headers.get("Host", "")):
            raise _foreign(f"A page of {origin[:100]!r} asked.", "gateway_origins")
    elif headers.get("Sec-Fetch-Site", "none").strip().lower() not in OWN_SITES:
        raise _foreign("A page of another site asked.", "gateway_origins")


def allows(origin: str, rules: Rules, host: str) -> bool:
    """A page of this origin may ask; one that we have served ourselves may."""
    return (
        "*" in rules.origins or origin.lower() in rules.origins or origin.lower() == f"http://{host.lower()}"
    )


def host_name(host: str) -> str:
    """The name in a Host header, in lower case and without the port."""
    name, colon, port = host.strip().lower().rpartition(":")
    is_port = (
        bool(colon) and port.isascii() and port.isdigit() and not (name.startswith("[") and name[-1:] != "]")
    )
    return (name if is_port else host.strip().lower()).removesuffix(".")


def is_address(host: str) -> bool:
    """Whether the name in a Host header is an IP address; with a zone it is none that a URL can have."""
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return "%" not in bare and (ipaddress.ip_address(bare).version == 6) is (bare != host)
    except ValueError:
        return False


def digest(key: str) -> str:
    """What is kept of a key; one that was sent may be any bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def cors_headers(headers: Mapping[str, str], rules: Rules) -> dict[str, str]:
    """What tells a browser that a page may read the answer; empty where none asks."""
    origin = headers.get("Origin")
    if origin is None:
        return {}
    found = {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Expose-Headers": EXPOSED_HEADERS,
        "Vary": "Origin",
    }
    if "Access-Control-Request-Method" in headers:
        found |= {
            "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
            "Access-Control-Allow-Headers": headers.get("Access-Control-Request-Headers", USUAL_HEADERS),
            "Access-Control-Max-Age": "600",
        }
        # A browser that keeps public pages from private addresses asks for this beside.
        if headers.get("Access-Control-Request-Private-Network", "").lower() == "true":
            found["Access-Control-Allow-Private-Network"] = "true"
    return found


def origin_fault(origin: str) -> str | None:
    """What is wrong with an origin in the settings; None when it is one."""
    if origin == "*":
        return None
    parts = urllib.parse.urlsplit(origin)
    if parts.scheme and parts.netloc and not parts.path and not parts.query and not parts.fragment:
        return None
    return "an origin is a scheme, a host and perhaps a port, such as http://localhost:3000"


def _has_key(headers: Mapping[str, str], digests: Iterable[str]) -> bool:
    scheme, _, bearer = headers.get("Authorization", "").partition(" ")
    sent = [headers.get("x-api-key", ""), bearer.strip() if scheme.lower() == "bearer" else ""]
    given = [digest(key) for key in sent if key]
    # All are compared, so that the time tells nothing of which is close.
    return any([hmac.compare_digest(one, known) for one in given for known in digests])


def _foreign(what: str, setting: str) -> LlmError:
    return LlmError(
        ErrorCode.FOREIGN_ORIGIN,
        f"{what} That is refused, for any page could then use your models.",
        hint=f"Where you mean it, add it to {setting}.",
    )
