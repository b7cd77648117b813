"""What an engine says of itself, as data: version, options of ``--help``, devices. Pure.

Held against the texts of the builds in ``tests/data/engines``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from lllm3090d.engines.capabilities import Backend, ListedDevice, Option
from lllm3090d.planning.units import MIB

OPTION_LINE = re.compile(
    r"^(?P<names>-{1,2}[A-Za-z][^\s,]*(?:,\s+-{1,2}[A-Za-z][^\s,]*)*)(?P<rest>.*)$", re.MULTILINE
)
SECTION_LINE = re.compile(r"^-{3,} .* -{3,}$", re.MULTILINE)
VARIABLE = re.compile(r"\(env:\s*([A-Z][A-Z0-9_]*)\)")
# A description starts at column 40, or on the next line; at least two spaces part it from the value.
DESCRIPTION_GAP = re.compile(r"\s{2,}")
REMOVED_REMARK = "the argument has been removed"
ALLOWED_LIST = re.compile(r"allowed values:\s*([^()]+)")
ALLOWED_BULLET = re.compile(
    r"^\s*- ['\"]?(?P<name>[A-Za-z0-9][\w.+-]*)['\"]?(?P<default> \(default\))?:", re.MULTILINE
)
QUOTED_DEFAULT = re.compile(r"default:\s*(['\"])(.*?)\1")
BARE_DEFAULT = re.compile(r"default:\s*([^\s,()][^,()]*)")
# ``0 = model training context size``, ``-1; -1 = disabled``: a number, then what it means.
EXPLAINED_NUMBER = re.compile(r"(-?\d[\d.]*)(?:; | [=-] )")
WORD_LIST = re.compile(r"[a-z][a-z0-9-]*(,[a-z][a-z0-9-]*)+")

VERSION_NUMBER = re.compile(r"\bbuild (\d+)|^(\d+)(?= \()")
VERSION_COMMIT = re.compile(r"\bcommit (\w+)|^\d+ \((\w+)\)")
# Builds from a source without its history count from 0 or 1.
LEAST_NUMBER = 1000

DEVICES_MARK = "Available devices:"
DEVICE_LINE = re.compile(
    r"^\s+(?P<name>[A-Za-z][A-Za-z0-9_]*): (?P<description>.*)\((?P<total_mib>\d{1,9}) MiB, \d+ MiB free\)\s*$"
)
BACKENDS: Mapping[str, Backend] = {
    "CUDA": Backend.CUDA,
    "Vulkan": Backend.VULKAN,
    "ROCm": Backend.ROCM,
    "HIP": Backend.ROCM,
    "SYCL": Backend.SYCL,
    "Metal": Backend.METAL,
    "MTL": Backend.METAL,
}
# Listed as devices, yet they compute on the processor.
HOST_ACCELERATORS = frozenset({"BLAS", "AMX", "CPU", "ZenDNN", "KleidiAI"})


def parse_version(text: str) -> str:
    """The version line without its label, whatever its format; else the first line, else ``unknown``.

    Seen: ``version: 0.6.0-dev (build 0, commit unknown)``, ``version: 11434 (abc1234)``, ``version: 0.7.0``.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        label, colon, value = line.partition(":")
        if colon and label.lower() == "version" and value.strip():
            return value.strip()
    return lines[0] if lines else "unknown"


def build_number(version: str) -> int | None:
    """llama.cpp's build number out of a version; None where there is none that means anything.

    ``4321 (abcdef)`` and ``0.7.0 (build 11669, commit Debian)`` have one; a build from a source without its
    history says 0 or 1.
    """
    found = VERSION_NUMBER.search(version)
    number = int(found[1] or found[2]) if found else 0
    return number if number >= LEAST_NUMBER else None


def commit(version: str) -> str | None:
    """The commit in a version, as it is written there; None where there is none."""
    found = VERSION_COMMIT.search(version)
    name = (found[1] or found[2]) if found else "unknown"
    return None if name == "unknown" else name


def parse_options(text: str) -> tuple[Option, ...]:
    """Every option of a help text, in order.

    Options stand at the start of a line, their spellings separated by commas, the value's name after the
    last. Those that are only kept to say that they were removed do not count.
    """
    options = []
    matches = list(OPTION_LINE.finditer(text))
    starts = [match.start() for match in matches] + [len(text)]
    for match, end in zip(matches, starts[1:], strict=True):
        body = text[match.start() : end]
        section = SECTION_LINE.search(body)
        if section is not None:
            body = body[: section.start()]
        if REMOVED_REMARK not in body:
            options.append(_option(match, body))
    return tuple(options)


def _option(match: re.Match[str], body: str) -> Option:
    names = tuple(name.strip() for name in match["names"].split(","))
    rest = match["rest"]
    value = ""
    # ``-c,    --ctx-size N    size of ...``: one space and a word is a value, two begin the description.
    if rest.startswith(" ") and not DESCRIPTION_GAP.match(rest) and rest.strip():
        value = DESCRIPTION_GAP.split(rest.strip(), maxsplit=1)[0]
    lines = [rest.strip().removeprefix(value), *body.splitlines()[1:]]
    description = "\n".join(line.strip() for line in lines)
    bullets = list(ALLOWED_BULLET.finditer(description)) if value else []
    default = _default(description, [bullet["name"] for bullet in bullets if bullet["default"]])
    listed = dict.fromkeys(bullet["name"] for bullet in bullets)
    if listed and default is not None and default.isalnum():
        listed.setdefault(default)  # some texts explain only the others
    return Option(
        names=names,
        value=value,
        allowed=_allowed(value, description, tuple(listed)),
        default=default,
        variables=tuple(VARIABLE.findall(body)),
    )


def _allowed(value: str, description: str, bullets: tuple[str, ...]) -> tuple[str, ...]:
    """Values that a placeholder such as ``[on|off]`` or ``{none,layer}`` or the description lists."""
    if WORD_LIST.fullmatch(value):
        return tuple(value.split(","))
    for opening, closing, separator in (("[", "]", "|"), ("{", "}", ","), ("<", ">", "|")):
        inner = value[1:-1]
        if value.startswith(opening) and value.endswith(closing) and separator in inner:
            words = tuple(word.strip() for word in inner.split(separator))
            # <dev1,dev2,..> and <0...100> are no lists.
            return words if all(re.fullmatch(r"[\w.+-]+", word) for word in words) else ()
    listed = ALLOWED_LIST.search(description)
    if listed:
        return tuple(word for part in listed[1].split(",") if (word := part.strip()))
    return bullets


def _default(description: str, bullets: list[str]) -> str | None:
    """The default that the description names, unquoted; a word such as ``enabled`` for switches."""
    if bullets:
        return bullets[0]
    text = " ".join(description.split())
    quoted, bare = QUOTED_DEFAULT.search(text), BARE_DEFAULT.search(text)
    if quoted and (bare is None or quoted.start() <= bare.start()):
        return quoted[2]
    if bare is None:
        return None
    explained = EXPLAINED_NUMBER.match(bare[1])
    return explained[1] if explained else bare[1].strip()


def parse_help(text: str) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """Options, those of them that take a value, and environment variables, out of a help text."""
    options = parse_options(text)
    return (
        frozenset(name for option in options for name in option.names),
        frozenset(name for option in options if option.value for name in option.names),
        frozenset(VARIABLE.findall(text)),
    )


def parse_devices(text: str) -> tuple[tuple[str, ...], Backend]:
    """Device names and backend out of ``--list-devices``; UNKNOWN without a list, or for an unknown kind."""
    _, mark, rest = text.rpartition(DEVICES_MARK)
    if not mark:
        return (), Backend.UNKNOWN
    names = tuple(match["name"] for line in rest.splitlines() if (match := DEVICE_LINE.match(line)))
    kinds = [name.rstrip("0123456789") for name in names]
    known = [BACKENDS[kind] for kind in kinds if kind in BACKENDS]
    if known:
        return names, known[0]
    listed = [line.strip() for line in rest.splitlines() if line.strip()]
    if all(kind in HOST_ACCELERATORS for kind in kinds) and (names or listed in ([], ["(none)"], ["none"])):
        return names, Backend.CPU
    return names, Backend.UNKNOWN


def parse_listed(text: str) -> tuple[ListedDevice, ...]:
    """Every device of ``--list-devices`` with what is said of it."""
    lines = text.rpartition(DEVICES_MARK)[2].splitlines() if DEVICES_MARK in text else []
    matches = (DEVICE_LINE.match(line) for line in lines)
    return tuple(
        ListedDevice(match["name"], match["description"].strip(), int(match["total_mib"]) * MIB)
        for match in matches
        if match
    )
