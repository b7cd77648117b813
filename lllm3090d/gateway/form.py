"""Whether a request is in one form only: nothing that another server before or behind us could read otherwise. Pure.

The parser refuses what is no HTTP (two lengths, a length beside chunks, bare line feeds, folded headers). This is about
what is HTTP, or nearly, and is read in several ways: llama-server cuts a target at ``#`` and decodes ``%u0041``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from aiohttp import hdrs

# RFC 3986: pchar, "/" and "?", and of what is none the marks that clients are seen to send as they are.
_TARGET = re.compile(r"/(?:[!$&-;=?-Z_a-z~\[\]|{}\"<>^`]|%[0-9A-Fa-f]{2})*", re.ASCII)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
VERSIONS = frozenset({(1, 0), (1, 1)})
# Decided upon by one value, and so never by the first of several.
SINGLE = frozenset(
    {
        "host",
        "origin",
        "content-length",
        "transfer-encoding",
        "content-type",
        "content-encoding",
        "authorization",
        "x-api-key",
        "sec-fetch-site",
    }
)
LARGEST_HEAD_BYTES = 1 << 16


def fault(
    method: str, target: str, version: tuple[int, int], headers: Iterable[tuple[bytes, bytes]]
) -> str | None:
    """What is wrong with the form of a request; None when nothing is.

    Args:
        method: of HTTP.
        target: as it was sent.
        version: of HTTP.
        headers: as they were sent.
    """
    if version not in VERSIONS:
        return "its version of HTTP is neither 1.0 nor 1.1"
    if method not in METHODS:
        return f"the method {method[:20]!r} is not served here"
    if not (_TARGET.fullmatch(target) or (method == hdrs.METH_OPTIONS and target == "*")):
        return "its target is no path, as RFC 3986 has it: from / on, without #, escapes as %41"
    seen = set[str]()
    for name, value in headers:
        low = name.decode("latin-1").lower()
        if low in SINGLE and low in seen:
            return f"it has {low} twice"
        seen.add(low)
        if low == "transfer-encoding" and (value.strip().lower() != b"chunked" or version < (1, 1)):
            return "its Transfer-Encoding is another one than chunked, or none that HTTP/1.0 has"
    return None
