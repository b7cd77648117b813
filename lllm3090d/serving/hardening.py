"""What a model's unit may not do: directives that a user manager really enforces, and that no engine has to break.

All of them are filters of system calls and flags of the process (seccomp and prctl), which need no privileges and mean
the same in every systemd from 252 on. What is left out, and why, is in ``docs/explanation/hardening.md``; a test holds
this table, the daemon's unit file and that page to each other.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the table of signatures needs GLib; what is said here does not
    from lllm3090d.bus.properties import PropertyValue

# Unix sockets: ours, and the driver's. Netlink: interfaces and devices, which drivers and libc ask for. Internet:
# images that a request names by address; nothing listens there.
ADDRESS_FAMILIES = ("AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK")

HARDENING: Mapping[str, PropertyValue] = MappingProxyType(
    {
        "NoNewPrivileges": True,
        "LockPersonality": True,
        "RestrictRealtime": True,
        "RestrictSUIDSGID": True,
        "RestrictNamespaces": 0,  # none stays allowed
        "RestrictAddressFamilies": (True, ADDRESS_FAMILIES),
        "SystemCallArchitectures": ("native",),
        "SystemCallFilter": (True, ("@system-service",)),
        # An answer in place of the end of the process: a driver that tries one and can do without goes on.
        "SystemCallErrorNumber": int(errno.EPERM),
        "UMask": 0o077,
        # A dump would hold what people have asked, and takes as long to write as a model is large.
        "LimitCORE": 0,
    }
)
