"""``lllm3090ctl setup``: which files, what is done to each, and what is left alone."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090ctl import setup_actions, setup_disk, setup_files, setup_plan, setup_systemd
from lllm3090ctl.failures import Failure
from lllm3090ctl.output import Screen
from lllm3090ctl.setup_files import File, Places, executable, places, wanted, with_program
from lllm3090ctl.setup_plan import (
    Action,
    Found,
    Manifest,
    digest,
    installing,
    read_manifest,
    removing,
    written,
)

pytestmark = pytest.mark.unit

PROJECT = Path(__file__).parents[2]
HERE = Places(Path("/h"), Path("/h/.config"), Path("/h/.local/share"))
PROGRAM = Path("/venv/bin/lllm3090d")
A, B = Path("/h/a"), Path("/h/b")
OLD, NEW, MINE = b"old", b"new", b"mine"


def manifest(**files: bytes) -> Manifest:
    """One that has written these below /h."""
    return Manifest(str(PROGRAM), "1", {f"/h/{name}": digest(content) for name, content in files.items()})


def there(content: bytes, is_link: bool = False) -> Found:
    return Found(digest(content), is_link)


# --- files ----------------------------------------------------------------------------------------------------


def test_the_wheel_carries_what_is_shipped_and_a_tree_has_one_copy() -> None:
    """Links, so that there is nothing to be held to the original; the pattern takes each of them."""
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert "shipped/*/*" in project["package-data"]["lllm3090ctl"]
    assert project["packages"]["find"]["exclude"] == ["lllm3090ctl.shipped*"]
    for link in setup_files.SHIPPED.iterdir():
        assert link.is_symlink() and link.resolve().is_relative_to(PROJECT), link
        assert any(link.iterdir()), link


def test_every_unit_is_installed_and_starts_this_daemon() -> None:
    files = {file.path: file.content.decode() for file in wanted(HERE, PROGRAM)}
    originals = {
        path.name: path.read_text("utf-8") for path in (PROJECT / "systemd").iterdir() if path.is_file()
    }
    units = {name for name in originals if Path(name).suffix in setup_files.UNIT_SUFFIXES}
    assert {"lllm3090d.service", "lllm3090d.socket", "lllm3090-gateway.socket", "lllm3090.slice"} <= units
    for name in units:
        content = files[HERE.units / name]
        assert "/usr/bin/lllm3090d" not in content
        assert content.replace(f'"{PROGRAM}"', "/usr/bin/lllm3090d") == originals[name]
    assert f'ExecStart="{PROGRAM}"\n' in files[HERE.units / "lllm3090d.service"]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, HERE),
        ({"XDG_CONFIG_HOME": "/c", "XDG_DATA_HOME": "/d"}, Places(Path("/h"), Path("/c"), Path("/d"))),
        ({"XDG_CONFIG_HOME": "relative", "XDG_DATA_HOME": ""}, HERE),
    ],
)
def test_places(variables: Mapping[str, str], expected: Places) -> None:
    assert places({"HOME": "/h", **variables}) == expected


@pytest.mark.parametrize("variables", [{}, {"HOME": ""}, {"HOME": "relative"}])
def test_a_home_that_is_none_is_the_one_of_the_account(variables: Mapping[str, str]) -> None:
    assert places(variables).home == Path(pwd.getpwuid(os.getuid()).pw_dir)


def test_man_pages_are_where_man_looks_wherever_data_is() -> None:
    files = {file.path for file in wanted(Places(Path("/h"), Path("/c"), Path("/d")), PROGRAM)}
    assert Path("/h/.local/share/man/man1/lllm3090ctl.1") in files
    assert Path("/h/.local/share/man/man5/lllm3090-config.5") in files
    assert Path("/d/dbus-1/services/org.lllm3090.Manager1.service") in files
    assert Path("/d/zsh/site-functions/_lllm3090ctl") in files


@pytest.mark.parametrize(
    ("path", "word"),
    [
        ("/usr/bin/x", '"/usr/bin/x"'),
        ("/a b/x", '"/a b/x"'),
        ("/100%/x", '"/100%%/x"'),
        ("/$HOME/x", '"/$HOME/x"'),
        ("/a;b/x", '"/a;b/x"'),
        ("/ä/x", '"/ä/x"'),
    ],
)
def test_paths_are_quoted_for_systemd(path: str, word: str) -> None:
    assert executable(Path(path)) == word
    assert with_program("[Service]\nExecStart=/usr/bin/lllm3090d --x\n", Path(path)) == (
        f"[Service]\nExecStart={word} --x\n"
    )


@pytest.mark.parametrize("path", ["/a\nb", '/a"b', "/a'b", "/a\\b", "/a\x7fb", os.fsdecode(b"/a\xff")])
def test_a_path_that_no_unit_can_name_is_refused(path: str) -> None:
    with pytest.raises(Failure) as caught:
        executable(Path(path))
    assert caught.value.problem["code"] == "path_unusable"


def test_the_program_is_that_of_this_interpreter() -> None:
    assert setup_files.program() == Path(sys.prefix) / "bin" / "lllm3090d"


def test_without_a_daemon_there_is_nothing_to_set_up(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(setup_files, "_candidates", lambda: iter([tmp_path / "lllm3090d"]))
    with pytest.raises(Failure) as caught:
        setup_files.program()
    assert caught.value.problem["code"] == "no_daemon"


def test_the_program_does_not_import_the_daemon() -> None:
    code = (
        "import sys; from pathlib import Path; from lllm3090ctl import setup_files as s;"
        "s.wanted(s.places({'HOME': '/h'}), Path('/p')); s.program();"
        "sys.exit(any(name.split('.')[0] == 'lllm3090d' for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


# --- what is done to each -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "before", "action"),
    [
        (None, None, Action.CREATE),
        (None, {"a": OLD}, Action.CREATE),
        (there(NEW), None, Action.SAME),
        (there(NEW), {"a": OLD}, Action.SAME),
        (there(OLD), {"a": OLD}, Action.REPLACE),
        (there(MINE), {"a": OLD}, Action.KEEP),
        (there(MINE), None, Action.SAVE),
        (there(MINE), {"b": OLD}, Action.SAVE),
        (there(MINE, is_link=True), None, Action.KEEP),
        (there(OLD, is_link=True), {"a": OLD}, Action.KEEP),
        (there(NEW, is_link=True), None, Action.SAME),
    ],
)
def test_installing_one_file(
    found: Found | None, before: Mapping[str, bytes] | None, action: Action
) -> None:
    known = None if before is None else manifest(**before)
    steps = installing([File(A, NEW)], {} if found is None else {A: found}, known)
    assert [(step.path, step.action) for step in steps] == [(A, action)]
    assert (steps[0].content == NEW) is steps[0].changes
    # An entry of a desktop: somebody's own, which turns a package's off, is no obstacle but a decision.
    (entry,) = installing([File(A, NEW, yields=True)], {} if found is None else {A: found}, known)
    assert entry.action is (Action.KEEP if action is Action.SAVE else action)


@pytest.mark.parametrize(
    ("found", "actions"),
    [
        (None, []),
        (there(OLD), [Action.REMOVE]),
        (there(MINE), [Action.KEEP]),
        (there(OLD, True), [Action.KEEP]),
    ],
)
def test_what_an_older_release_had_goes(found: Found | None, actions: Sequence[Action]) -> None:
    steps = installing([File(A, NEW)], {} if found is None else {B: found}, manifest(b=OLD))
    assert [step.action for step in steps if step.path == B] == actions


@pytest.mark.parametrize(
    ("found", "before", "actions"),
    [
        (None, {"a": OLD}, []),
        (there(OLD), {"a": OLD}, [Action.REMOVE]),
        (there(NEW), {"a": OLD}, [Action.REMOVE]),  # written by hand, or before there was a manifest
        (there(NEW), None, [Action.REMOVE]),
        (there(MINE), {"a": OLD}, [Action.KEEP]),
        (there(MINE), None, [Action.KEEP]),
        (there(NEW, is_link=True), None, [Action.KEEP]),
    ],
)
def test_removing_one_file(
    found: Found | None, before: Mapping[str, bytes] | None, actions: Sequence[Action]
) -> None:
    known = None if before is None else manifest(**before)
    steps = removing([File(A, NEW)], {} if found is None else {A: found}, known)
    assert [step.action for step in steps] == actions


def test_a_kept_file_is_told_again_and_never_taken_for_ours() -> None:
    before, files = manifest(a=OLD), [File(A, NEW)]
    steps = installing(files, {A: there(MINE)}, before)
    after = Manifest(str(PROGRAM), "2", written(steps, before))
    assert installing(files, {A: there(MINE)}, after)[0].action is Action.KEEP
    assert removing(files, {A: there(MINE)}, after)[0].action is Action.KEEP


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        "[" * 200_000,
        '{"format": 2}',
        '{"format": 1}',
        '{"format": 1, "program": 1, "build": ""}',
        *(
            json.dumps({"format": 1, "program": "/p", "build": "1", "files": {}, "directories": [], **odd})
            for odd in (
                {"program": "/p\0"},
                {"program": "p"},
                {"files": {"h/a": ""}},
                {"files": {"/h\0": ""}},
                {"directories": ["/h\0"]},
            )
        ),
    ],
)
def test_what_is_no_manifest_is_none(text: str) -> None:
    assert read_manifest(text) is None


def test_manifests_are_read_as_they_were_written() -> None:
    known = Manifest("/p", "0.1.0 7", {"/h/a": digest(OLD)}, ("/h/x", "/h/x/y"))
    assert read_manifest(known.text()) == known
    wrong = json.loads(known.text()) | {"files": {"/h/a": 3}}
    assert read_manifest(json.dumps(wrong)) is None


def test_what_a_damaged_manifest_says_of_other_places_counts_for_nothing() -> None:
    """Nobody's note is deleted because a file names it with its digest."""
    inside = str(HERE.units / "old.service")
    beyond = (f"{HERE.home}/note", f"{HERE.units}/../../../note", "/etc/passwd")
    known = Manifest("/p", "1", dict.fromkeys((inside, *beyond), digest(OLD)))
    assert set(known.within(HERE.roots).files) == {inside}
    assert all(any(file.path.is_relative_to(root) for root in HERE.roots) for file in wanted(HERE, PROGRAM))


CONTENTS = st.sampled_from([b"one", b"two", b"three"])
TREES = st.dictionaries(st.sampled_from(["a", "b", "c/d", "c/e/f"]), CONTENTS)


@given(present=TREES, first=TREES, second=TREES)
def test_whatever_was_there_comes_through(
    tmp_path_factory: pytest.TempPathFactory,
    present: Mapping[str, bytes],
    first: Mapping[str, bytes],
    second: Mapping[str, bytes],
) -> None:
    """Two releases one after the other, then none: nothing of a person's is lost, and nothing of ours stays."""
    root = tmp_path_factory.mktemp("home")
    own = root / "own"
    for name, content in present.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    for release in (first, second, second):
        run(root, own, release)
        for name, content in release.items():
            assert (root / name).read_bytes() == content
    run(root, own, None)
    left = [path.read_bytes() for path in root.rglob("*") if path.is_file()]
    ours = {name for name in present if name in {**first, **second}}
    untouched = {name: content for name, content in present.items() if name not in ours}
    for name, content in untouched.items():
        assert (root / name).read_bytes() == content
    # Of one that is the same as ours nobody can tell whose it was.
    saved = [present[name] for name in ours if not _alike(name, present, first, second)]
    assert sorted(left) == sorted([*untouched.values(), *saved])
    made = [path for path in root.rglob("*") if path.is_dir() and not any(path.rglob("*"))]
    assert all(any(name.startswith(f"{path.relative_to(root)}/") for name in present) for path in made)


def _alike(name: str, present: Mapping[str, bytes], *releases: Mapping[str, bytes]) -> bool:
    """Whether the first release that has the file has it as it was there."""
    return present[name] == next(release[name] for release in releases if name in release)


def run(root: Path, own: Path, release: Mapping[str, bytes] | None) -> None:
    """What the command does with files."""
    before = setup_disk.manifest(own)
    files = [File(root / name, content) for name, content in (release or {}).items()]
    known = map(Path, before.files if before is not None else ())
    found = setup_disk.found({*(file.path for file in files), *known})
    if release is None:
        setup_disk.carry_out(removing(files, found, before), own / "saved")
        if before is not None:
            (own / setup_disk.MANIFEST).unlink()
            setup_disk.take_directories([*before.directories, own / "saved", own])
        return
    steps = installing(files, found, before)
    hashes = {**setup_plan.adopted(steps, files), **written(steps, before)}
    _, made = setup_disk.carry_out(steps, own / "saved")
    directories = {*map(str, made), *(before.directories if before is not None else ()), str(own)}
    setup_disk.put_manifest(own, Manifest("/p", "1", hashes, tuple(directories)))


def test_saved_files_have_names_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "a"
    places_taken = []
    for content in (b"1", b"2", b"3"):
        file.write_bytes(content)
        moved, _ = setup_disk.carry_out([setup_plan.Step(file, Action.SAVE, NEW)], tmp_path / "saved")
        places_taken.append(moved[file])
        assert file.read_bytes() == NEW
    assert [(place.name, place.read_bytes()) for place in places_taken] == [
        ("a", b"1"),
        ("a.1", b"2"),
        ("a.2", b"3"),
    ]


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    target = tmp_path / "a"
    target.mkdir()
    with pytest.raises(OSError):
        setup_disk.write(target, NEW)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


# --- the command, where no user manager is --------------------------------------------------------------------


def setup(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it in a clean environment."""
    command = [sys.executable, "-m", "lllm3090ctl", "setup", *arguments]
    environment = {
        "HOME": str(home),
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(PROJECT),
        "LC_ALL": "C.UTF-8",
    }
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env=environment, cwd="/"
    )


def tree(home: Path) -> Mapping[str, Any]:
    return {
        str(path.relative_to(home)): path.read_bytes() if path.is_file() else None
        for path in home.rglob("*")
    }


def test_a_dry_run_changes_nothing_and_says_what_would_be(tmp_path: Path) -> None:
    done = setup(tmp_path, "--dry-run")
    assert (done.returncode, done.stderr, tree(tmp_path)) == (0, "", {})
    assert f"would be created: {tmp_path}/.config/systemd/user/lllm3090d.service" in done.stdout
    assert setup(tmp_path, "--remove").stdout == "Nothing is set up.\n"
    assert tree(tmp_path) == {}


def test_a_second_time_changes_nothing_and_removal_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / ".config").mkdir()
    first = json.loads(setup(tmp_path, "--json").stdout)
    assert first["changed"] and {file["action"] for file in first["files"]} == {"create"}
    assert any("does not answer" in note for note in first["notes"])
    present = tree(tmp_path)
    second = json.loads(setup(tmp_path, "--json").stdout)
    assert not second["changed"] and {file["action"] for file in second["files"]} == {"same"}
    assert tree(tmp_path) == present
    unit = tmp_path / ".config/systemd/user/lllm3090d.service"
    link = unit.parent / "default.target.wants" / unit.name
    link.parent.mkdir()
    link.symlink_to(unit)
    removed = setup(tmp_path, "--remove")
    assert removed.returncode == 0 and "Removed." in removed.stdout
    assert tree(tmp_path) == {".config": None}


def test_another_installation_that_is_still_there_is_left_alone(tmp_path: Path) -> None:
    setup(tmp_path)
    theirs = tmp_path / "other" / "lllm3090d"
    theirs.parent.mkdir()
    theirs.write_text("")
    theirs.chmod(0o755)
    file = tmp_path / ".local/share/lllm3090/setup.json"
    file.write_text(file.read_text().replace(str(setup_files.program()), str(theirs)))
    present = tree(tmp_path)
    for arguments in ((), ("--remove",), ("--dry-run",)):
        done = setup(tmp_path, *arguments, "--json")
        problem = json.loads(done.stdout)
        assert (done.returncode, problem["code"]) == (5, "set_up_by_another")
        assert f"{theirs.with_name('lllm3090ctl')} setup --remove" in problem["hint"]
    assert tree(tmp_path) == present
    assert setup(tmp_path, "--take-over").returncode == 0
    assert read_manifest(file.read_text()) is not None and str(theirs) not in file.read_text()
    theirs.unlink()
    assert setup(tmp_path, "--remove").returncode == 0


def test_one_that_has_gone_is_replaced(tmp_path: Path) -> None:
    setup(tmp_path)
    file = tmp_path / ".local/share/lllm3090/setup.json"
    file.write_text(file.read_text().replace(str(setup_files.program()), "/nowhere/bin/lllm3090d"))
    assert setup(tmp_path).returncode == 0
    assert str(setup_files.program()) in file.read_text()


def test_what_somebody_else_wrote_is_saved_and_told(tmp_path: Path) -> None:
    unit = tmp_path / ".config/systemd/user/lllm3090d.service"
    unit.parent.mkdir(parents=True)
    unit.write_text("[Service]\nExecStart=/home/me/mine\n")
    done = setup(tmp_path)
    saved = tmp_path / ".local/share/lllm3090/saved/lllm3090d.service"
    assert f"replaced: {unit}. It was not written by setup; what was there: {saved}" in done.stdout
    assert "mine" in saved.read_text() and "mine" not in unit.read_text()


def test_an_autostart_entry_that_was_turned_off_stays_so(tmp_path: Path) -> None:
    """Before there was a manifest, after it, and after a removal; all else is written and taken away."""
    entry = tmp_path / ".config/autostart/lllm3090d.desktop"
    entry.parent.mkdir(parents=True)
    entry.write_text("[Desktop Entry]\nHidden=true\n")
    present = tree(tmp_path)
    for _ in range(2):
        done = setup(tmp_path)
        assert done.returncode == 0 and f"kept: {entry}. It is not the one of setup" in done.stdout
    assert setup(tmp_path, "--remove").returncode == 0
    assert tree(tmp_path) == present
    entry.unlink()
    assert setup(tmp_path).returncode == 0
    entry.write_text(entry.read_text() + "Hidden=true\n")
    for arguments in ((), ("--remove",), ()):
        assert f"kept: {entry}." in setup(tmp_path, *arguments).stdout
    assert entry.read_text().endswith("Hidden=true\n")


def test_what_this_release_brings_is_written_where_an_older_one_was_set_up(tmp_path: Path) -> None:
    setup(tmp_path)
    file, entry = (
        tmp_path / ".local/share/lllm3090/setup.json",
        tmp_path / ".config/autostart/lllm3090d.desktop",
    )
    document = json.loads(file.read_text())
    del document["files"][str(entry)]
    document["directories"].remove(str(entry.parent))
    document["build"] = "an older one"
    file.write_text(json.dumps(document))
    entry.unlink()
    entry.parent.rmdir()
    done = json.loads(setup(tmp_path, "--json").stdout)
    assert [each["path"] for each in done["files"] if each["action"] != "same"] == [str(entry)]
    assert not json.loads(setup(tmp_path, "--json").stdout)["changed"]
    setup(tmp_path, "--remove")
    assert tree(tmp_path) == {}


def test_a_masked_unit_stays_masked(tmp_path: Path) -> None:
    unit = tmp_path / ".config/systemd/user/lllm3090-gateway.socket"
    unit.parent.mkdir(parents=True)
    unit.symlink_to("/dev/null")
    done = setup(tmp_path)
    assert f"kept: {unit}." in done.stdout and unit.readlink() == Path("/dev/null")


def test_a_file_in_the_way_of_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / ".config").write_text("")
    done = setup(tmp_path, "--json")
    problem = json.loads(done.stdout)
    assert (done.returncode, problem["code"]) == (78, "files_unusable")
    assert str(tmp_path / ".config") in problem["detail"]


def test_words_that_do_not_go_together_are_refused(tmp_path: Path) -> None:
    done = setup(tmp_path, "--remove", "--no-enable")
    assert done.returncode == 2 and "--no-enable does not go with --remove" in done.stderr


def test_units_of_a_package_are_found(tmp_path: Path) -> None:
    places_of_units = [str(tmp_path / name) for name in ("etc", "usr")]
    assert setup_systemd.system_units(places_of_units) is None
    (tmp_path / "usr").mkdir()
    (tmp_path / "usr" / "lllm3090d.service").write_text("")
    assert setup_systemd.system_units(places_of_units) == tmp_path / "usr"


def test_a_manager_that_is_not_there_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not setup_systemd.answers()
    assert not setup_systemd.attempt("start", "x.socket")
    with pytest.raises(Failure) as caught:
        setup_systemd.do("start", "x.socket")
    assert caught.value.problem["code"] == "systemd_failed"


# --- what systemd is told -------------------------------------------------------------------------------------


class Manager:
    """A user manager as far as setup speaks to it; in place of the module's functions."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
        self.enabled: set[str] = set()
        self.active: set[str] = set()
        self.masked: set[str] = set()
        self.models: tuple[str, ...] = ()
        self.port_is_taken = False
        self.package: Path | None = None
        self.told: list[tuple[str, ...]] = []
        monkeypatch.setenv("HOME", str(home))
        for variable in ("XDG_CONFIG_HOME", "XDG_DATA_HOME"):
            monkeypatch.delenv(variable, raising=False)
        for name, function in {
            "answers": lambda: True,
            "system_units": lambda: self.package,
            "is_active": lambda unit: unit in self.active,
            "is_enabled": lambda unit: unit in self.enabled,
            "is_masked": lambda unit: unit in self.masked,
            "running_models": lambda: self.models,
            "do": self.do,
            "attempt": self.attempt,
            "read_bus_services_again": lambda: None,
        }.items():
            monkeypatch.setattr(setup_systemd, name, function)

    def attempt(self, *arguments: str) -> bool:
        """What systemd would do, as far as it matters here."""
        verb, *units = (each for each in arguments if each != "--quiet")
        self.told.append((verb, *units))
        if verb == "start" and self.port_is_taken and setup_systemd.GATEWAY_SOCKET in units:
            return False
        if verb in {"enable", "disable"}:
            self.enabled = self.enabled | set(units) if verb == "enable" else self.enabled - set(units)
        if verb in {"start", "stop"}:
            (self.active.update if verb == "start" else self.active.difference_update)(units)
        return True

    def do(self, *arguments: str) -> None:
        assert self.attempt(*arguments), arguments

    def run(self, capsys: pytest.CaptureFixture[str], **options: bool) -> dict[str, Any]:
        """One call of the command."""
        self.told = []
        is_removal = options.pop("remove", False)
        usual = {"dry_run": False, "take_over": False}
        if is_removal:
            assert setup_actions.remove(Screen(True), **{**usual, **options}) == 0
        else:
            assert setup_actions.install(Screen(True), **{**usual, "enable": True, **options}) == 0
        document: dict[str, Any] = json.loads(capsys.readouterr().out)
        return document


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Manager:
    return Manager(monkeypatch, tmp_path)


SERVICE, CONTROL, GATEWAY = setup_systemd.SERVICE, setup_systemd.CONTROL_SOCKET, setup_systemd.GATEWAY_SOCKET
ALL = (CONTROL, GATEWAY, SERVICE)


def test_a_first_time_enables_and_starts_the_sockets(
    manager: Manager, capsys: pytest.CaptureFixture[str]
) -> None:
    manager.run(capsys, dry_run=True)
    assert manager.told == []
    done = manager.run(capsys)
    assert manager.told == [
        ("daemon-reload",),
        ("enable", CONTROL, GATEWAY),
        ("stop", *ALL),
        ("start", GATEWAY),
        ("start", CONTROL),
    ]
    assert done["notes"] == []
    again = manager.run(capsys)
    assert manager.told == [] and not again["changed"]


def test_an_upgrade_starts_the_daemon_anew_where_it_ran(
    manager: Manager, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.run(capsys)
    for ran in (False, True):
        if ran:
            manager.active.add(SERVICE)
        monkeypatch.setattr(setup_files, "build", lambda ran=ran: f"0.2.0 {ran}")
        done = manager.run(capsys)
        expected = [("stop", *ALL), ("start", GATEWAY), ("start", CONTROL)]
        assert manager.told == [*expected, *([("start", SERVICE)] if ran else [])]
        assert done["systemd"] == [f"restart {CONTROL} {GATEWAY}{f' {SERVICE}' if ran else ''}"]


def test_with_no_enable_only_what_ran_is_started(
    manager: Manager, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.run(capsys, enable=False)
    assert manager.told == [("daemon-reload",)] and manager.active == set()
    manager.active = {CONTROL, SERVICE}
    monkeypatch.setattr(setup_files, "build", lambda: "0.2.0 1")
    manager.run(capsys, enable=False)
    assert manager.told == [("stop", *ALL), ("start", CONTROL), ("start", SERVICE)]


def test_a_port_that_is_taken_is_told_and_no_reason_to_begin_anew(
    manager: Manager, capsys: pytest.CaptureFixture[str]
) -> None:
    manager.port_is_taken = True
    assert any("port is taken" in note for note in manager.run(capsys)["notes"])
    manager.active.add(SERVICE)
    again = manager.run(capsys)
    assert manager.told == [] and not again["changed"]  # the daemon listens by itself, or says why not


def test_a_masked_socket_is_neither_enabled_nor_started(
    manager: Manager, capsys: pytest.CaptureFixture[str]
) -> None:
    manager.masked = {GATEWAY}
    assert manager.run(capsys)["notes"] == []
    assert manager.active == manager.enabled == {CONTROL}
    assert not manager.run(capsys)["changed"]


def test_removal_names_the_models_that_it_stops(
    manager: Manager, capsys: pytest.CaptureFixture[str]
) -> None:
    manager.run(capsys)
    manager.models = ("lllm3090-a-1.service",)
    dry = manager.run(capsys, remove=True, dry_run=True)
    assert manager.told == [] and dry["stopped_models"] == list(manager.models) and not dry["changed"]
    done = manager.run(capsys, remove=True)
    assert done["stopped_models"] == list(manager.models)
    assert manager.told[:2] == [("stop", *ALL), ("stop", setup_systemd.MODELS)]
    assert manager.enabled == set()


def test_beside_a_package_models_go_on_and_it_is_told(
    manager: Manager, capsys: pytest.CaptureFixture[str]
) -> None:
    manager.package = Path("/usr/lib/systemd/user")
    manager.models = ("lllm3090-a-1.service",)
    assert any("A package has units" in note for note in manager.run(capsys)["notes"])
    done = manager.run(capsys, remove=True)
    assert done["stopped_models"] == [] and ("stop", setup_systemd.MODELS) not in manager.told
    assert any("Models go on" in note for note in done["notes"])


def test_the_client_of_a_package_has_nothing_to_set_up(
    manager: Manager, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    manager.package = Path("/usr/lib/systemd/user")
    monkeypatch.setattr(setup_files, "program", lambda: Path(setup_files.USUAL_PROGRAM))
    with pytest.raises(Failure) as caught:
        manager.run(capsys)
    assert caught.value.problem["code"] == "of_a_package" and tree(tmp_path) == {}
