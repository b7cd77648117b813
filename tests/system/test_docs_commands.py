"""Every command of the manual is run, page by page, against one daemon with a stand-in card and a stand-in engine.

What is not run is named in ``packaging/dev/manual/rules.py`` with the reason, and read instead
(``tests/unit/test_docs_rules.py``).
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from manual.blocks import Command
from manual.rules import REPOSITORY, RULES, all_commands, placed, rule_of
from manual.shell import Shell

from tests.fakes.engine import install_fake_engine, set_behaviour
from tests.fakes.model_files import published, write
from tests.fakes.nvml import FakeNvml
from tests.system.harness import (
    BIN,
    DAEMON_UNIT,
    GATEWAY_UNIT,
    Service,
    free_port,
    model_units,
    running,
    systemctl,
)
from tests.system.rig import DEVICE

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

ENGINE = "b11434-cuda-sm86"
# Names that the pages speak of, and whose dimensions they have here.
MODELS = {
    "Qwen3.8-27B": "qwen3.5-27b",
    "gemma-3-27b": "gemma-3-27b",
    "gemma-3-4b": "gemma-3-270m",
    "gemma3": "gemma-3-270m",
}
# Programs of others: each looks whether it could work with what it is given.
AGENT = """#!/bin/sh
set -eu
curl -sf -o /dev/null -H "Authorization: Bearer ${ANTHROPIC_AUTH_TOKEN:-$OPENAI_API_KEY}" \\
  "${ANTHROPIC_BASE_URL:-${OPENAI_BASE_URL%/v1}}/v1/models"
"""
EDITOR = "#!/bin/sh\necho '# seen' >>\"$1\"\n"
UNIT_EDITOR = "#!/bin/sh\necho '[Unit]' >>\"$1\"\n"
# As curl shows it, whose own exit status is 0 then.
PROBLEM = re.compile(r'^\{"type": ?"urn:lllm3090:error:(\w+)"', re.MULTILINE)
SCRIPT = "import os\nassert os.environ['OPENAI_BASE_URL']\n"


class HomeService(Service):
    """With everything where a person has it."""

    @property
    def config_file(self) -> Path:
        """Its settings file."""
        return self.directory / ".config" / "lllm3090" / "config.toml"


@dataclass
class Scene:
    """A person's home, and what the pages find there."""

    service: HomeService
    home: Path
    port: int
    smollm2: Path

    @property
    def work(self) -> Path:
        """Where the reader types."""
        return self.home / "work"

    @property
    def bin(self) -> Path:
        """Programs of others."""
        return self.home / "bin"

    def environment(self) -> dict[str, str]:
        """Of the reader's shell."""
        return (
            os.environ
            | self.service.environment
            | {
                "PATH": f"{self.bin}:{BIN}:{os.environ['PATH']}",
                "HOME": str(self.home),
                "EDITOR": str(self.bin / "an-editor"),
                "SYSTEMD_EDITOR": str(self.bin / "a-unit-editor"),
                "NO_COLOR": "1",
                "USER": "reader",
            }
        )

    def furnish(self) -> None:
        """What is there once and for all."""
        for name, text in {
            "claude": AGENT,
            "opencode": AGENT,
            "an-editor": EDITOR,
            "a-unit-editor": UNIT_EDITOR,
        }.items():
            self._program(name, text)
        for name, dimensions in MODELS.items():
            write(self.service.models_dir / name / "model.gguf", published()[dimensions])
        for path in (
            self.home / "data" / "models" / "qwen-27b-00001-of-00003.gguf",
            self.home / "data" / "some-model.gguf",
        ):
            write(path, published()["qwen3.5-27b"])
        built = self.home / "src" / "llama.cpp" / "build" / "bin"
        install_fake_engine(built)
        shutil.copytree(built, self.home / ".local" / "share" / "lllm3090" / "engines" / ENGINE)

    def begin_page(self, page: str) -> None:
        """As a reader comes to a page: nothing runs but the daemon, and settings are the usual ones."""
        systemctl("start", DAEMON_UNIT)
        self.service.ctl("resume", check=False)
        systemctl("disable", "--now", "lllm3090-metrics.timer", check=False)
        systemctl("reset-failed", "lllm3090-metrics.service", check=False)
        for name in self.service.instances():
            self.service.ctl("unload", name, "--force")
        for key in self.service.ctl_json("key", "list")["keys"]:
            self.service.ctl("key", "remove", key["name"])
        self.service.config_file.unlink(missing_ok=True)
        self.service.reload()
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        (self.work / "script.py").write_text(SCRIPT)
        (self.work / "new.toml").write_text('cache_type = "q8_0"\n')
        (self.work / "qwen-27b.gguf").symlink_to(self.service.models_dir / "Qwen3.8-27B" / "model.gguf")
        (self.work / ".engine" / "models").mkdir(parents=True)
        (self.work / ".engine" / "models" / "smollm2.gguf").symlink_to(self.smollm2)
        subprocess.run(["git", "init", "-q"], cwd=self.work, check=True)
        own = self.service.models_dir / "SmolLM2"
        own.mkdir(exist_ok=True)
        copy = own / "smollm2.gguf"
        if page == "README.md":
            copy.unlink(missing_ok=True)  # the reader puts it there
        elif not copy.exists():
            copy.symlink_to(self.smollm2)
        for unit, text in units_of(page):
            (self.home / ".config" / "systemd" / "user").mkdir(parents=True, exist_ok=True)
            (self.home / ".config" / "systemd" / "user" / unit).write_text(text)

    def _program(self, name: str, text: str) -> None:
        path = self.bin / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


def units_of(page: str) -> list[tuple[str, str]]:
    """Units of a person's own that a page shows: their names stand before them."""
    path = REPOSITORY / page
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8")
    return re.findall(
        r"^`~/\.config/systemd/user/([\w.-]+)`:\n\n```ini\n(.*?)```", text, re.DOTALL | re.MULTILINE
    )


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One daemon for all pages."""
    smollm2 = REPOSITORY / ".engine" / "models" / "smollm2.gguf"
    if not smollm2.is_file():
        pytest.skip(f"{smollm2} is not there; run: make test")
    home = Path.home()  # that of the private user manager, so that of the daemon too
    aside = tmp_path_factory.mktemp("docs")
    nvml = FakeNvml(aside / "card")
    port = free_port()
    settings = {
        "gateway_port": str(port),
        "desktop": "inactive",
        "verify_after_load": "off",
        "least_idle_s": "0",
        "least_residency_s": "0",
    }
    service = HomeService(home, settings, nvml.environment)
    scene = Scene(service, home, port, smollm2)
    before = {path.name for path in home.iterdir()}
    drop_in = service.units_dir / f"{GATEWAY_UNIT}.d"
    drop_in.mkdir(parents=True, exist_ok=True)
    (drop_in / "test.conf").write_text(f"[Socket]\nListenStream=\nListenStream=127.0.0.1:{port}\n")
    try:
        scene.furnish()
        for place in (home / "src/llama.cpp/build/bin", home / f".local/share/lllm3090/engines/{ENGINE}"):
            set_behaviour(place, devices=(DEVICE,), nvml_state=str(nvml.state), vram_mib=1000)
        with running(service):
            yield scene
    finally:
        shutil.rmtree(drop_in)
        for path in home.iterdir():
            if path.name not in before:
                path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)


def by_page() -> dict[str, list[Command]]:
    """Commands that are run."""
    found: dict[str, list[Command]] = {}
    for command in all_commands():
        rule = rule_of(command)
        if rule is None or not rule.skip:
            found.setdefault(command.page, []).append(command)
    return found


def try_page(scene: Scene, commands: Sequence[Command], notes: Path) -> list[str]:
    """Run commands in order; what is wrong, in words."""
    notes.mkdir(parents=True)
    shell = Shell(scene.work, scene.environment(), notes)
    wrong = []
    try:
        for command in commands:
            rule = rule_of(command)
            text = placed(command.text, port=scene.port, home=scene.home)
            if rule is not None and rule.before:
                done = shell.run(rule.before)
                if done.status != 0:
                    wrong.append(f"{command}\n  before it: {done.output}")
            if rule is not None and rule.terminal:
                text = f"script -qefc {shlex.quote(text)} /dev/null"
            if rule is not None and rule.follows:
                said = shell.follow(text)
                if not said or "lllm3090ctl: " in said or PROBLEM.search(said):
                    wrong.append(f"{command}\n  {said}")
                continue
            done = shell.run(text)
            expected = (0,) if rule is None else rule.statuses
            problem = PROBLEM.search(done.output)
            if done.status not in expected:
                wrong.append(f"{command}\n  exit status {done.status}, not {expected}:\n{done.output}")
            elif (problem[1] if problem else "") != ("" if rule is None else rule.refused):
                wrong.append(f"{command}\n  its answer is a problem, or another one: {done.output}")
    finally:
        shell.close()
    return wrong


@pytest.mark.parametrize("page", by_page())
def test_every_command_works(page: str, scene: Scene, tmp_path: Path) -> None:
    """In the order of the page, with what the page says before."""
    scene.begin_page(page)
    commands = by_page()[page]
    wrong = try_page(scene, commands, tmp_path / "notes")
    assert wrong == [], "\n".join(wrong)
    print(f"{page}: {len(commands)} commands")  # noqa: T201 - the figure is what is reported


def test_a_wrong_command_is_found(scene: Scene, tmp_path: Path) -> None:
    """This test can fail: an option, a model and a path of the API that are not there."""
    scene.begin_page("planted.md")
    texts = (
        "lllm3090ctl ps --wide",
        "lllm3090ctl load no-such-model",
        'curl -s --unix-socket "$XDG_RUNTIME_DIR/lllm3090d/control.sock" http://d/v1/nothing',
        "lllm3090ctl ps",
    )
    planted = [Command("planted.md", line, text) for line, text in enumerate(texts, 1)]
    wrong = try_page(scene, planted, tmp_path / "notes")
    assert [each.split("\n")[0] for each in wrong] == [str(command) for command in planted[:3]]
    assert model_units() == {}


def test_every_rule_is_needed() -> None:
    """What a rule speaks of is in the manual."""
    rules = {rule_of(command) for command in all_commands()}
    assert [rule.pattern for rule in RULES if rule not in rules] == []
