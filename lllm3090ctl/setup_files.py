"""What ``setup`` puts where, with the path of this installation's daemon in it. Reads the package, changes nothing.

The files are those that a distribution installs (``lllm3090ctl/shipped``: links in a working tree, copies in a wheel).
"""

from __future__ import annotations

import os
import pwd
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import own_failure

DISTRIBUTION = "lllm3090"
DAEMON = "lllm3090d"
SHIPPED = Path(__file__).with_name("shipped")
# What stands for the daemon in the units, as a distribution installs it.
USUAL_PROGRAM = "/usr/bin/lllm3090d"
# The same for the client, in what a desktop starts at login.
CLIENT = "lllm3090ctl"
USUAL_CLIENT = f"/usr/bin/{CLIENT}"
BUS_NAME = "org.lllm3090.Manager1"
# In a desktop entry: what comes after it is executed by a shell, as one word each.
SHELL_FIRST = r'sh -c "exec \\"\\$0\\" \\"\\$@\\"" '
UNSAFE = frozenset("\"'\\\x7f")
# What stands for a byte of a path that is not UTF-8.
UNDECODABLE = frozenset(map(chr, range(0xDC80, 0xDD00)))
UNIT_SUFFIXES = frozenset({".service", ".socket", ".slice", ".target", ".timer"})
# Where each shell looks without being told; zsh has to be.
COMPLETIONS: Mapping[str, str] = {
    "lllm3090ctl.bash": "bash-completion/completions/lllm3090ctl",
    "_lllm3090ctl": "zsh/site-functions/_lllm3090ctl",
    "lllm3090ctl.fish": "fish/vendor_completions.d/lllm3090ctl.fish",
}


class Places(NamedTuple):
    """The directories of a person.

    Attributes:
        home: HOME.
        config: XDG_CONFIG_HOME, where systemd looks for units and a desktop for what to start.
        data: XDG_DATA_HOME, where D-Bus and shells look.
    """

    home: Path
    config: Path
    data: Path

    @property
    def units(self) -> Path:
        """Of systemd."""
        return self.config / "systemd" / "user"

    @property
    def autostart(self) -> Path:
        """Of desktops: what is started at login."""
        return self.config / "autostart"

    @property
    def manual(self) -> Path:
        """Of man, which looks beside the directories of PATH, so not where XDG_DATA_HOME says."""
        return self.home / ".local" / "share" / "man"

    @property
    def roots(self) -> tuple[Path, ...]:
        """Everything that setup writes is below one of these."""
        return self.units, self.autostart, self.data, self.manual

    @property
    def own(self) -> Path:
        """What only setup has use for: its manifest, and files that it has saved."""
        return self.data / DISTRIBUTION


class File(NamedTuple):
    """A file as it should be.

    Attributes:
        path: of it.
        content: of it.
        yields: what a person has put there stays, and is their decision: an entry that turns the one of a package off.
    """

    path: Path
    content: bytes
    yields: bool = False


def places(environment: Mapping[str, str]) -> Places:
    """Those of the XDG base directories; a relative one counts as not set, as the specification has it."""
    home = Path(environment.get("HOME", ""))
    if not home.is_absolute():
        home = Path(pwd.getpwuid(os.getuid()).pw_dir)

    def base(variable: str, usual: str) -> Path:
        told = Path(environment.get(variable, ""))
        return told if told.is_absolute() else home / usual

    return Places(home, base("XDG_CONFIG_HOME", ".config"), base("XDG_DATA_HOME", ".local/share"))


def program() -> Path:
    """The daemon of this installation, as pip has recorded it.

    Raises:
        Failure: ``no_daemon``, where it is not there.
    """
    for candidate in _candidates():
        if os.access(candidate, os.X_OK):
            return Path(os.path.normpath(candidate))
    raise own_failure(
        "no_daemon",
        "The daemon is not installed",
        f"There is no {DAEMON} beside this lllm3090ctl.",
        exit_status=ExitStatus.FAILURE,
        hint="Install lllm3090 as a whole, for instance with pipx.",
    )


def _candidates() -> Iterator[Path]:
    try:
        for file in distribution(DISTRIBUTION).files or ():
            if file.name == DAEMON and file.parent.name in {"bin", "Scripts"}:
                yield Path(str(file.locate()))
    except PackageNotFoundError:
        pass  # a distribution may leave out the metadata
    yield Path(sysconfig.get_path("scripts")) / DAEMON
    if Path(sys.prefix).is_relative_to("/usr"):  # a package may keep its libraries for itself
        yield Path(USUAL_PROGRAM)


def build() -> str:
    """What tells one installation from the next at the same place: the version, and when pip has written it."""
    try:
        installed = distribution(DISTRIBUTION)
        record = next((file for file in installed.files or () if file.name == "RECORD"), None)
        stamp = Path(str(record.locate())).stat().st_mtime_ns if record is not None else 0
    except (PackageNotFoundError, OSError):
        return "unknown"
    return f"{installed.version} {stamp}"


def executable(path: Path) -> str:
    """A program as the first word of an ExecStart: in quotes, and without specifiers.

    A dollar sign stays: systemd expands variables in arguments, not in the path that it executes.

    Raises:
        Failure: ``path_unusable``: systemd starts no program whose path has a quote, a backslash or a control
            character, and reads no unit that is not UTF-8.
    """
    text = str(path)
    if any(character in UNSAFE or ord(character) < 32 or character in UNDECODABLE for character in text):
        raise own_failure(
            "path_unusable",
            "systemd cannot start this",
            "The path of the daemon has a quote, a backslash or a control character, or is not UTF-8:"
            f" {text!r}.",
            exit_status=ExitStatus.CONFIG,
            hint="Install lllm3090 at another place.",
        )
    return f'"{text.replace("%", "%%")}"'


def with_program(text: str, path: Path) -> str:
    """A unit that starts this program instead of the usual one."""
    return text.replace(f"ExecStart={USUAL_PROGRAM}", f"ExecStart={executable(path)}")


def with_client(text: str, path: Path) -> str:
    """A desktop entry that starts this client instead of the usual one.

    Quoted as the Desktop Entry Specification has it ("The Exec key"): in quotes, with a backslash, which is written
    twice, before what a quoted argument escapes, and percent signs doubled. TryExec is a plain string.

    Raises:
        Failure: ``path_unusable``, as of :func:`executable`.
    """
    executable(path)
    quoted = str(path).replace("%", "%%").replace("$", r"\\$").replace("`", r"\\`")
    # The specification has no program with an equals sign, and GLib finds none with a percent sign; arguments may
    # have both.
    first = SHELL_FIRST if {"%", "="} & set(str(path)) else ""
    return text.replace(f"TryExec={USUAL_CLIENT}", f"TryExec={path}").replace(
        f"\nExec={USUAL_CLIENT}", f'\nExec={first}"{quoted}"'
    )


def wanted(where: Places, daemon: Path, shipped: Path = SHIPPED) -> tuple[File, ...]:
    """All files as they should be, in the order of their paths.

    Args:
        where: the person's directories.
        daemon: what the units are to start.
        shipped: directory of what is shipped.
    """
    files = [
        File(where.units / file.name, with_program(file.read_text("utf-8"), daemon).encode())
        for file in (shipped / "systemd").iterdir()
        if file.suffix in UNIT_SUFFIXES
    ]
    files += [
        File(
            where.autostart / file.name,
            with_client(file.read_text("utf-8"), daemon.with_name(CLIENT)).encode(),
            yields=True,
        )
        for file in (shipped / "login").iterdir()
        if file.suffix == ".desktop"
    ]
    bus = where.data / "dbus-1"
    files += [File(bus / "services" / file.name, file.read_bytes()) for file in (shipped / "dbus").iterdir()]
    files.append(File(bus / "interfaces" / f"{BUS_NAME}.xml", _interface()))
    files += [
        File(where.data / place, (shipped / "completions" / name).read_bytes())
        for name, place in COMPLETIONS.items()
    ]
    files += [
        File(where.manual / f"man{file.suffix[1:]}" / file.name, file.read_bytes())
        for file in (shipped / "man").iterdir()
    ]
    return tuple(sorted(files))


def _interface() -> bytes:
    """The contract on the bus: a file of the daemon's package, which is not imported for it."""
    found = find_spec(DAEMON)
    for directory in (found.submodule_search_locations or ()) if found is not None else ():
        file = Path(directory) / "bus" / f"{BUS_NAME}.xml"
        if file.is_file():
            return file.read_bytes()
    raise own_failure(
        "no_daemon",
        "The daemon is not installed",
        f"The package {DAEMON} is not there, or is not whole.",
        exit_status=ExitStatus.FAILURE,
        hint="Install lllm3090 as a whole, for instance with pipx.",
    )
