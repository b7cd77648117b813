"""What starts the daemon at login: the preset, the autostart entry, and which of them does what when."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from lllm3090ctl import autostart, setup_systemd
from lllm3090ctl.autostart import Verdict, verdict
from lllm3090ctl.failures import Failure
from lllm3090ctl.setup_files import SHIPPED, Places, wanted, with_client

pytestmark = pytest.mark.unit

PROJECT = Path(__file__).parents[2]
LOGIN = PROJECT / "packaging" / "login"
ENTRY = LOGIN / "lllm3090d.desktop"
PRESET = LOGIN / "90-lllm3090.preset"
GENERATOR = Path("/usr/lib/systemd/user-generators/systemd-xdg-autostart-generator")
SERVICE, CONTROL, GATEWAY = "lllm3090d.service", "lllm3090d.socket", "lllm3090-gateway.socket"
UNITS = (SERVICE, CONTROL, GATEWAY)
# What stands for a program in a desktop entry has to reach it: each of these means something to somebody on the way.
ODD = (
    "plain",
    "a b",
    "100%",
    "a=b",
    "%f = $(id)",
    "%f",
    "$HOME",
    "`id`",
    "semi;colon",
    "ä",
    "#",
    "[*]",
    "~",
    "a&b",
)
# Never set: what is looked for again and again is no busy loop.
PAUSE = threading.Event()
LAUNCH = """
import sys
from gi.repository import Gio
for entry in sys.argv[1:]:
    assert Gio.DesktopAppInfo.new_from_filename(entry).launch([], None)
"""


# --- the preset -----------------------------------------------------------------------------------------------


def states(root: Path, *command: str) -> Sequence[str]:
    """Do something to the units of a root, for all its users; which are enabled then, in the order of UNITS."""
    if shutil.which("systemctl") is None:
        pytest.skip("systemctl is not installed")
    call = ["systemctl", "--global", f"--root={root}", "--quiet"]
    subprocess.run([*call, *command], check=True, capture_output=True, timeout=60)
    done = subprocess.run([*call[:-1], "is-enabled", *UNITS], capture_output=True, text=True, check=False)
    return done.stdout.split()


def rooted(root: Path, *, preset: bool) -> Path:
    """A root with our units, and with the preset or without."""
    shutil.copytree(PROJECT / "systemd", root / "usr/lib/systemd/user")
    (root / "usr/lib/systemd/user-preset").mkdir()
    if preset:
        shutil.copyfile(PRESET, root / "usr/lib/systemd/user-preset" / PRESET.name)
    return root


DECIDED = ["disabled", "enabled", "disabled"]


@pytest.mark.parametrize("units", [UNITS, UNITS[::-1], (SERVICE, CONTROL), (CONTROL, SERVICE, GATEWAY)])
def test_what_the_preset_enables_is_the_control_socket(tmp_path: Path, units: Sequence[str]) -> None:
    """In any order; and so does ``preset-all``, as packages of other distributions and images call it."""
    root = rooted(tmp_path / "root", preset=True)
    assert states(root, "preset", *units) == DECIDED
    assert states(root, "preset-all") == DECIDED


def test_what_a_person_enables_goes_back_by_the_preset(tmp_path: Path) -> None:
    """``enable`` and ``disable`` take both sockets along (Also=); a preset decides on each unit by itself."""
    root = rooted(tmp_path / "root", preset=True)
    assert states(root, "preset", CONTROL) == DECIDED
    assert states(root, "enable", SERVICE) == ["enabled"] * 3
    assert states(root, "preset", SERVICE) == ["disabled", "enabled", "enabled"]
    assert states(root, "preset", *UNITS) == DECIDED
    assert states(root, "enable", SERVICE) == ["enabled"] * 3
    assert states(root, "disable", SERVICE) == ["disabled"] * 3


def test_without_it_a_preset_would_enable_everything(tmp_path: Path) -> None:
    """systemd's own default, so the file is what decides."""
    assert states(rooted(tmp_path / "root", preset=False), "preset", SERVICE) == ["enabled"] * 3


def test_the_debian_package_enables_what_the_preset_enables() -> None:
    rules = (PROJECT / "packaging" / "debian" / "rules").read_text(encoding="utf-8")
    lines = PRESET.read_text(encoding="utf-8").splitlines()
    preset = {unit: what for what, unit in (line.split() for line in lines if line[0] != "#")}
    assert set(preset) == set(UNITS)
    calls = re.findall(r"^\tdh_installsystemduser (--no-enable )?(.*)$", rules, re.MULTILINE)
    package = {unit: "disable" if option else "enable" for option, units in calls for unit in units.split()}
    assert package == preset


# --- the autostart entry --------------------------------------------------------------------------------------


def made_by_systemd(tmp_path: Path, entries: Mapping[str, str]) -> tuple[Mapping[str, str], str]:
    """Units that systemd makes of entries, and what it says."""
    if not GENERATOR.exists():
        pytest.skip("systemd-xdg-autostart-generator is not installed")
    system, home = tmp_path / "xdg" / "autostart", tmp_path / "home"
    system.mkdir(parents=True)
    (home / ".config" / "autostart").mkdir(parents=True)
    for number, (name, text) in enumerate(entries.items()):
        # By turns in a directory of all, as packages have it, and of the person, as setup has it.
        (system if number % 2 else home / ".config" / "autostart").joinpath(name).write_text(text)
    made = [tmp_path / name for name in ("normal", "early", "late")]
    for directory in made:
        directory.mkdir()
    done = subprocess.run(
        [GENERATOR, *made],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "XDG_CONFIG_DIRS": str(tmp_path / "xdg"),
            "SYSTEMD_LOG_TARGET": "console",
            "SYSTEMD_LOG_LEVEL": "debug",
        },
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    units = {path.name: path.read_text() for each in made for path in each.glob("*.service")}
    return units, done.stderr


def test_systemd_makes_no_unit_of_the_entry_and_has_nothing_to_say_against_it(tmp_path: Path) -> None:
    """It reads the entry, and would make a unit of it but for one line; of a broken one it complains."""
    client = tmp_path / "bin" / "lllm3090ctl"
    client.parent.mkdir()
    client.write_text("#!/bin/sh\n")
    client.chmod(0o755)
    ours = with_client(ENTRY.read_text(encoding="utf-8"), client)
    control = ours.replace("X-systemd-skip=true\n", "")
    assert control != ours
    units, said = made_by_systemd(
        tmp_path,
        {
            "of-the-person.desktop": ours,
            "of-all.desktop": ours,
            "control.desktop": control,
            "broken.desktop": re.sub(r"^Exec=.*", 'Exec="not closed', control, flags=re.MULTILINE),
        },
    )
    assert list(units) == ["app-control@autostart.service"]
    assert re.search(
        rf"^ExecStart=:?\"?{client}\"? autostart$", units["app-control@autostart.service"], re.MULTILINE
    )
    lines = {
        name: [line for line in said.splitlines() if name in line]
        for name in ("of-the-person", "of-all", "broken")
    }
    for name in ("of-the-person", "of-all"):
        assert len(lines[name]) == 1 and lines[name][0].endswith("marked as skipped by generator."), said
    assert any("Exec" in line for line in lines["broken"]), said


def test_it_is_a_valid_entry() -> None:
    if shutil.which("desktop-file-validate") is None:
        pytest.skip("desktop-file-validate is not installed (package desktop-file-utils)")
    done = subprocess.run(["desktop-file-validate", ENTRY], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_setup_puts_it_where_desktops_look_and_it_starts_this_client() -> None:
    where = Places(Path("/h"), Path("/c"), Path("/d"))
    files = {file.path: file.content.decode() for file in wanted(where, Path("/venv/bin/lllm3090d"))}
    text = files[Path("/c/autostart/lllm3090d.desktop")]
    assert "/usr/bin/" not in text
    assert (
        "\nTryExec=/venv/bin/lllm3090ctl\n" in text and '\nExec="/venv/bin/lllm3090ctl" autostart\n' in text
    )
    assert text.replace('"/venv/bin/lllm3090ctl"', "/usr/bin/lllm3090ctl").replace(
        "=/venv/bin/lllm3090ctl", "=/usr/bin/lllm3090ctl"
    ) == ENTRY.read_text(encoding="utf-8")
    # The preset is for all users of a machine, so not for a home.
    assert (SHIPPED / "login" / PRESET.name).is_file()
    assert not any("preset" in path.name for path in files)


def test_desktops_start_programs_at_odd_places(tmp_path: Path) -> None:
    """By the library that most of them use for it."""
    entries = []
    for number, name in enumerate(ODD):
        client = tmp_path / name / "lllm3090ctl"
        client.parent.mkdir()
        client.write_text(f'#!/bin/sh\nprintf "%s" "$*" >{tmp_path}/done-{number}.new\n'
                          f"mv {tmp_path}/done-{number}.new {tmp_path}/done-{number}\n")  # fmt: skip
        client.chmod(0o755)
        entries.append(tmp_path / f"{number}.desktop")
        entries[-1].write_text(with_client(ENTRY.read_text(encoding="utf-8"), client))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LAUNCH, *entries],
        env=os.environ | {"HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    told = {name: tmp_path / f"done-{number}" for number, name in enumerate(ODD)}
    # It does not wait for what it starts.
    until_s = time.monotonic() + 30.0
    while missing := {name for name, file in told.items() if not file.exists()}:
        assert time.monotonic() < until_s, missing
        PAUSE.wait(0.02)
    assert {file.read_text() for file in told.values()} == {"autostart"}


@pytest.mark.parametrize("path", ["/a\nb", '/a"b', "/a'b", "/a\\b"])
def test_a_path_that_no_unit_can_name_is_not_for_an_entry_either(path: str) -> None:
    with pytest.raises(Failure) as caught:
        with_client(ENTRY.read_text(encoding="utf-8"), Path(path))
    assert caught.value.problem["code"] == "path_unusable"


# --- what its command does ------------------------------------------------------------------------------------

DEAD = {"LoadState": "loaded", "ActiveState": "inactive"}
ENABLED = {**DEAD, "UnitFileState": "enabled"}
OFF, ON = {"ActiveState": "inactive"}, {"ActiveState": "active"}


@pytest.mark.parametrize(
    ("service", "target", "expected"),
    [
        (ENABLED, OFF, Verdict.START),
        ({**ENABLED, "UnitFileState": "enabled-runtime"}, OFF, Verdict.START),
        ({**ENABLED, "ActiveState": "failed"}, OFF, Verdict.START),
        (ENABLED, ON, Verdict.SYSTEMD_STARTS_IT),
        (ENABLED, {**OFF, "Job": "12"}, Verdict.SYSTEMD_STARTS_IT),
        ({**ENABLED, "ActiveState": "failed"}, ON, Verdict.SYSTEMD_STARTS_IT),
        ({**ENABLED, "ActiveState": "active"}, OFF, Verdict.RUNS),
        ({**ENABLED, "ActiveState": "activating"}, ON, Verdict.RUNS),
        ({**DEAD, "UnitFileState": "disabled"}, OFF, Verdict.NOT_ENABLED),
        ({**DEAD, "UnitFileState": "linked"}, OFF, Verdict.NOT_ENABLED),
        ({**DEAD, "UnitFileState": ""}, ON, Verdict.NOT_ENABLED),
        ({**DEAD, "UnitFileState": "disabled", "ActiveState": "active"}, OFF, Verdict.RUNS),
        ({**DEAD, "LoadState": "masked", "UnitFileState": "masked"}, OFF, Verdict.MASKED),
        ({**DEAD, "UnitFileState": "masked-runtime"}, OFF, Verdict.MASKED),
        ({**DEAD, "LoadState": "not-found"}, OFF, Verdict.NOT_INSTALLED),
        ({}, {}, Verdict.NOT_ENABLED),
    ],
)
def test_verdict(service: Mapping[str, str], target: Mapping[str, str], expected: Verdict) -> None:
    assert verdict(service, target) is expected
    assert autostart.TOLD[expected]


def answering(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str) -> Path:
    """A systemctl that answers so; where it writes down what it was told."""
    program, told = tmp_path / "systemctl", tmp_path / "told"
    program.write_text(f'#!/bin/sh\necho "$*" >>{told}\n{script}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return told


SHOWN = "LoadState=loaded\nActiveState=inactive\nUnitFileState=enabled\n\nLoadState=loaded\nActiveState=inactive\n"


def test_it_asks_once_and_starts_the_daemon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = answering(monkeypatch, tmp_path, f"[ $2 = start ] || printf '{SHOWN}'")
    assert autostart.start() is Verdict.START
    asked, started = told.read_text().splitlines()
    assert (
        asked
        == "--user show --property=LoadState,ActiveState,UnitFileState,Job lllm3090d.service default.target"
    )
    assert started == "--user start lllm3090d.service"


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 1", "no_user_manager"),
        ("echo LoadState=loaded", "no_user_manager"),  # half an answer is none
        (f"[ $2 = show ] && printf '{SHOWN}'", "systemd_failed"),
    ],
)
def test_what_cannot_be_done_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, code: str
) -> None:
    answering(monkeypatch, tmp_path, script)
    with pytest.raises(Failure) as caught:
        autostart.start()
    assert caught.value.problem["code"] == code
    assert caught.value.exit_status != 0 and caught.value.problem["hint"]


def test_properties_of_units_stay_with_their_unit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    answering(monkeypatch, tmp_path, "printf 'A=1\\nB=x=y\\n\\nA=2\\n'")
    assert setup_systemd.told_of(("A", "B"), "one", "two") == ({"A": "1", "B": "x=y"}, {"A": "2"})
    assert setup_systemd.told_of(("A", "B"), "one") is None
