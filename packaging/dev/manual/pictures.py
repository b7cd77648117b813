"""Pictures of the manual: what the client writes to a terminal, as SVG: ``make pictures``.

With ``--check``: whether they are still true.

The client, the daemon and its arithmetic are real, in a user manager of their own. The card is a stand-in that
answers as the driver of an RTX 3090 does, the models are files with the headers of published ones and holes for
weights, and the engine is a stand-in that takes what it is told to; so the pictures can be made anywhere, and are the
same everywhere.
"""

from __future__ import annotations

import argparse
import contextlib
import html
import io
import os
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from tests.fakes.model_files import published, write
from tests.fakes.nvml import FakeCard
from tests.system.harness import BIN, DAEMON_UNIT, systemctl
from tests.system.rig import MIB, Rig, rigged

DIRECTORY = Path(__file__).resolve().parents[3] / "docs" / "pictures"
COLUMNS, LINES = 92, 40
ERASED = "\x1b[2K"  # before it stands the progress of a load
DESKTOP_MIB = 1180  # what the stand-in card shows as taken by a desktop whose processes it does not list
MODELS = {"Qwen3.5-27B": "qwen3.5-27b", "gemma-3-27b": "gemma-3-27b", "LFM2-1.2B": "lfm2-1.2b"}
# Dark, so that it is a terminal on a light page and on a dark one; every colour is light.
THEME = TerminalTheme(
    (22, 27, 34),
    (230, 237, 243),
    [
        (139, 148, 158), (255, 161, 152), (126, 231, 135), (242, 204, 96),
        (165, 214, 255), (210, 168, 255), (118, 227, 234), (201, 209, 217),
    ],
)  # fmt: skip
# Fonts of the reader's own system: nothing is fetched.
FORMAT = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>TITLE</title>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, "DejaVu Sans Mono", "Liberation Mono", Menlo, Consolas, monospace; \
font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
<rect width="{width}" height="{height}" rx="10" fill="#161b22"/>
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


@dataclass(frozen=True)
class Picture:
    """One of them.

    Attributes:
        name: of its file, without suffix.
        command: as typed, without the program's name.
        status: exit status that it must have.
        until: beginning of the line from which on the rest is left out.
        same: it is the same on every machine, so ``--check`` looks at it.
    """

    name: str
    command: str
    status: int = 0
    until: str = ""
    same: bool = True

    @property
    def file(self) -> Path:
        """Where it is kept."""
        return DIRECTORY / f"{self.name}.svg"


# In this order: what is loaded for one is there for the next.
EMPTY = (
    Picture("refusal", "load gemma-3-27b --context 131072 --parallel 2 --cache-type f16", 5),
    Picture("plan", "plan qwen-27b"),
    Picture("explain", "plan qwen-27b --explain"),
    Picture("models", "models"),
)
LOADED = (
    Picture("ps", "ps"),
    Picture("gpu", "gpu", until="Host memory"),
    Picture("refusal-now", "plan gemma-3-27b --context 32768", 5),
    Picture("doctor", "doctor", 11, same=False),
)
PICTURES = EMPTY + LOADED


def main() -> int:
    """Make them, or check them; 1 if one is stale."""
    parser = argparse.ArgumentParser(description="Make the pictures of the manual.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where one is not what is shown now"
    )
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as directory:
        made = shown(Path(directory))
    if check:
        stale = stale_ones(made)
        sys.stderr.writelines(
            f"{name} is not what the program shows now; run: make pictures\n" for name in stale
        )
        return 1 if stale else 0
    DIRECTORY.mkdir(exist_ok=True)
    for picture in PICTURES:
        picture.file.write_text(made[picture.name], encoding="utf-8")
        print(picture.file.relative_to(DIRECTORY.parents[1]))
    return 0


def stale_ones(made: Mapping[str, str]) -> list[str]:
    """Names of those whose text is not that of their file."""
    return [
        picture.name
        for picture in PICTURES
        if not picture.file.is_file()
        or (
            picture.same and text_of(picture.file.read_text(encoding="utf-8")) != text_of(made[picture.name])
        )
    ]


def text_of(svg: str) -> str:
    """The letters of a picture, whatever way they are drawn."""
    found = re.findall(r"<text[^>]*>(.*?)</text>", svg, re.DOTALL)
    return " ".join(html.unescape(" ".join(found)).split())


def shown(directory: Path) -> dict[str, str]:
    """All pictures by name, made in an empty directory."""
    with scene(directory) as rig:
        made = {picture.name: drawn(picture, typed(picture, rig)) for picture in EMPTY}
        rig.load_ready("LFM2-1.2B", context_tokens=16_384, parallel=1, pin=True)
        rig.load_ready("Qwen3.5-27B", context_tokens=32_768, parallel=1, pin=True)
        made |= {picture.name: drawn(picture, typed(picture, rig)) for picture in LOADED}
    return made


@contextlib.contextmanager
def scene(directory: Path) -> Iterator[Rig]:
    """A daemon on a stand-in RTX 3090 with a desktop on it."""
    with rigged(directory, {}, {"desktop": "active"}) as rig:
        rig.nvml.write(FakeCard(other_bytes=DESKTOP_MIB * MIB))
        for name, dimensions in MODELS.items():
            write(rig.service.models_dir / name / "model.gguf", published()[dimensions])
        rig.behave(vram_mib_of={"LFM2-1.2B": 1420, "Qwen3.5-27B": 15_310})
        systemctl("restart", DAEMON_UNIT)
        yield rig


def typed(picture: Picture, rig: Rig) -> str:
    """What the command writes to a terminal; what differs from run to run is as in the first.

    Raises:
        RuntimeError: its exit status is another one than it should be.
    """
    terminal, end = os.openpty()
    ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    hidden = {"COLUMNS", "LINES", "NO_COLOR"}
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    environment |= rig.nvml.environment | {"TERM": "xterm-256color"}
    with subprocess.Popen(
        [str(BIN / "lllm3090ctl"), *picture.command.split()],
        stdout=end,
        stderr=end,
        stdin=end,
        env=environment,
    ) as client:
        os.close(end)
        chunks = []
        with contextlib.suppress(OSError):  # how a terminal says that its last user has gone
            while chunk := os.read(terminal, 65536):
                chunks.append(chunk)
    os.close(terminal)
    text = b"".join(chunks).decode().replace("\r\n", "\n").rpartition(ERASED)[2]
    if client.returncode != picture.status:
        raise RuntimeError(f"lllm3090ctl {picture.command}: exit status {client.returncode}:\n{text}")
    if picture.until:
        kept, left_out, _ = text.partition(f"\n{picture.until}")
        text = f"{kept}\n..." if left_out else text
    return steady(text.replace(str(rig.service.directory), "~"))


def steady(text: str) -> str:
    """Process ids, times and durations as they might be, the same in every run and as long as they were."""
    text = re.sub(r"(?<=pid )\d+|(?<=kill )\d+", "4242", text)
    text = re.sub(r"/run/user/\d+", "/run/user/1000", text)
    text = re.sub(r"\bidle \d+ s", "idle 4 s", text)
    text = re.sub(r"(?<=MiB  )\d+$", "4242", text, flags=re.MULTILINE)  # the last column of ps
    text = re.sub(r"(?<=lllm3090-)([\w.-]+?)-[0-9a-f]{8}(?=\.service)", r"\1-0a1b2c3d", text)
    text = re.sub(r"\b\d+ s\b(?=\s*$)", "40 s", text, flags=re.MULTILINE)
    return re.sub(r"\b[0-9a-f]{8}\b(?=\s|$)", "0a1b2c3d", text)


def drawn(picture: Picture, text: str) -> str:
    """The terminal as SVG."""
    title = html.escape(f"lllm3090ctl {picture.command}").replace("{", "{{").replace("}", "}}")
    console = Console(
        record=True,
        width=COLUMNS,
        file=io.StringIO(),
        force_terminal=True,
        color_system="standard",
        highlight=False,
    )
    console.print(Text.assemble(("$ ", "green"), (f"lllm3090ctl {picture.command}", "bold")), soft_wrap=True)
    for line in Text.from_ansi(text.rstrip("\n")).split("\n", allow_blank=True):
        for part in line.divide(range(COLUMNS, len(line), COLUMNS)) or [line]:  # as a terminal breaks it
            console.print(part, soft_wrap=True)
    return console.export_svg(
        theme=THEME, code_format=FORMAT.replace("TITLE", title), unique_id=f"p-{picture.name}"
    )


if __name__ == "__main__":
    sys.exit(main())
