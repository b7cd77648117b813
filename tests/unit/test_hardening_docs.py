"""The page about hardening, the daemon's unit file and the table for models say the same."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from lllm3090d.bus.properties import OLDEST_SYSTEMD, PROPERTIES, PropertyValue, encode
from lllm3090d.serving.hardening import HARDENING

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "hardening.md"
UNIT = ROOT / "systemd" / "lllm3090d.service"
# What systemd-analyze security of systemd 252 looks at.
ASSESSED = frozenset({
    "AmbientCapabilities", "CapabilityBoundingSet", "Delegate", "DeviceAllow", "IPAddressDeny",
    "KeyringMode", "LockPersonality", "MemoryDenyWriteExecute", "NoNewPrivileges", "NotifyAccess",
    "PrivateDevices", "PrivateMounts", "PrivateNetwork", "PrivateTmp", "PrivateUsers", "ProcSubset",
    "ProtectClock", "ProtectControlGroups", "ProtectHome", "ProtectHostname", "ProtectKernelLogs",
    "ProtectKernelModules", "ProtectKernelTunables", "ProtectProc", "ProtectSystem", "RemoveIPC",
    "RestrictAddressFamilies", "RestrictNamespaces", "RestrictRealtime", "RestrictSUIDSGID", "RootDirectory",
    "SupplementaryGroups", "SystemCallArchitectures", "SystemCallFilter", "UMask", "User",
})  # fmt: skip


def rows(section: str) -> list[list[str]]:
    """Cells of the table of a section, without its head."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def in_force() -> dict[str, tuple[str, str]]:
    return {name: (daemon, models) for name, daemon, models in rows("Directives in force")}


def directives() -> Mapping[str, str]:
    """Assignments of the daemon's unit, the last of each name."""
    return dict(re.findall(r"^([A-Za-z]+)=(.*)$", UNIT.read_text(encoding="utf-8"), re.MULTILINE))


def as_directive(name: str, value: PropertyValue) -> str:
    """A property as it is written in a unit file."""
    match name, value:
        case "UMask", int():
            return f"{value:04o}"
        case "RestrictNamespaces", 0:
            return "yes"
        case "SystemCallErrorNumber", int():
            return errno.errorcode[value]
        case _, bool():
            return "yes" if value else "no"
        case _, int():
            return str(value)
        case _, (True, tuple(names)):
            return " ".join(map(str, names))
        case _, tuple():
            return " ".join(map(str, value))
    raise AssertionError(f"{name}: {value!r}")


def test_the_table_of_models_is_that_of_the_page() -> None:
    expected = {name: models for name, (_, models) in in_force().items()}
    assert {name: as_directive(name, value) for name, value in HARDENING.items()} == expected


def test_the_unit_file_is_that_of_the_page() -> None:
    unit = directives()
    assert {name: unit.get(name) for name in in_force()} == {
        name: daemon for name, (daemon, _) in in_force().items()
    }


def test_every_directive_that_is_assessed_is_in_force_or_left_out_with_a_reason() -> None:
    left_out = {name: reason for name, reason in rows("Left out")}
    assert all(len(reason) > 10 for reason in left_out.values())
    assert set(left_out).isdisjoint(in_force())
    assert set(left_out) | set(in_force()) >= ASSESSED
    used = set(directives()) | set(HARDENING)
    assert used.isdisjoint(set(left_out) - {"NotifyAccess", "Delegate"})


def test_no_model_fails_to_start_for_a_directive_that_its_systemd_does_not_know() -> None:
    basic = {"UMask", "LimitCORE"}  # of every systemd, with seccomp or without
    assert {name for name in HARDENING if not PROPERTIES[name].optional} == basic
    assert encode(HARDENING, OLDEST_SYSTEMD).dropped == ()
    encoded = encode(HARDENING, OLDEST_SYSTEMD, set(HARDENING) - basic)
    assert {name for name, _ in encoded.variants} == basic
