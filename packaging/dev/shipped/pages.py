"""The manual pages of the two programs, of the settings and of the D-Bus interface."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from lllm3090ctl.exits import ExitStatus
from lllm3090d.__main__ import command_line
from lllm3090d.bus.service_contract import BUS_NAME, Argument, Interface, contract
from lllm3090d.setting_table import allowed
from lllm3090d.settings import (
    ENVIRONMENT_PREFIX,
    SETTING_KEYS,
    Settings,
    runtime_base,
    setting_kind,
)
from lllm3090d.version import VERSION
from shipped.roff import Page
from shipped.tree import Command, Option

SOURCE = f"lllm3090 {VERSION}"
MANUAL = "lllm3090"
CONFIG = "~/.config/lllm3090/config.toml"
UNITS = {"mib": "MiB", "tokens": "tokens", "s": "seconds", "days": "days"}
_TOLD = {
    "true": "announced by PropertiesChanged",
    "invalidates": "announced by PropertiesChanged without its value",
    "const": "never changes",
    "false": "not announced",
}


def client(root: Command, statuses: str) -> str:
    """``lllm3090ctl(1)``.

    Args:
        root: of all commands.
        statuses: docs/reference/exit-statuses.md, where they are told once for both programs.
    """
    page = Page("LLLM3090CTL", 1, SOURCE, MANUAL)
    page.section("NAME")
    page.line(f"lllm3090ctl - {_lower(root.summary)}")
    page.section("SYNOPSIS")
    page.line(
        "**lllm3090ctl** [**--socket** //PATH//] [**--timeout** //SECONDS//] //COMMAND// [//OPTIONS//] [//NAME//]"
    )
    page.section("DESCRIPTION")
    _help(page, root.command.help or "")
    page.section("OPTIONS")
    page.paragraph("These stand before the command.")
    _options(page, root.options)
    page.section("COMMANDS")
    for each in root.every():
        if not each.path:
            continue
        page.part(each.key)
        page.line(" ".join([f"**lllm3090ctl {each.key}**", *_synopsis(each)]))
        _help(page, each.command.help or "")
        _options(page, [option for option in each.options if "--help" not in option.names])
    page.section("EXIT STATUS")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| ([^|]+) \|", statuses, re.MULTILINE)
    for status, name, meaning in rows:
        if ExitStatus[name] is not ExitStatus.ALREADY_RUNNING:  # of the daemon alone
            page.term(f"**{status}**", meaning)
    page.section("ENVIRONMENT")
    page.term("**LLLM3090_RUNTIME_DIR**", "The directory of the daemon's control socket.")
    page.term("**LLLM3090_API_KEY**", "The gateway's key, where it asks for one.")
    page.term("**NO_COLOR**", "Write without colours.")
    page.section("FILES")
    page.term("//$XDG_RUNTIME_DIR/lllm3090d/control.sock//", "The daemon's control socket.")
    _see_also(page, "lllm3090d(8)", "lllm3090-config(5)", f"{BUS_NAME}(5)", "systemctl(1)")
    return page.text()


def daemon() -> str:
    """``lllm3090d(8)``."""
    parser = command_line()
    actions = [each for each in parser._actions if each.help is not argparse.SUPPRESS]
    page = Page("LLLM3090D", 8, SOURCE, MANUAL)
    page.section("NAME")
    page.line("lllm3090d - the daemon that owns the graphics card and runs local models")
    page.section("SYNOPSIS")
    shown = (f"[{_flag(action)}]" for action in actions if "--help" not in action.option_strings)
    page.line(" ".join(["**lllm3090d**", *shown]))
    page.section("DESCRIPTION")
    page.paragraph(parser.description or "")
    page.paragraph(
        "It reads a model's GGUF file, works out what a launch of llama.cpp's `llama-server` will take, refuses with"
        " the arithmetic where that does not fit, and otherwise runs the model as a transient unit of the user's"
        " systemd. Models go on while the daemon is stopped, killed or upgraded; it finds them again. It is asked by"
        " `lllm3090ctl`, over its control socket, over D-Bus, and over an address that OpenAI's and Anthropic's"
        " libraries understand."
    )
    page.section("OPTIONS")
    for action in actions:
        page.term(_flag(action, ", "), _sentence(action.help or ""))
    page.section("SIGNALS")
    page.term("**SIGHUP**", "Read the settings again. Bad ones are reported, and the old ones stay.")
    page.term(
        "**SIGTERM**, **SIGINT**", "End. Models go on, unless the setting `stop_models_on_exit` says no."
    )
    page.section("EXIT STATUS")
    page.term("**0**", "It was asked to end.")
    page.term("**69**", "Another daemon runs, or systemd listens in its place.")
    page.term(
        "**78**",
        "The settings are wrong; the message names the file or variable, the key and what is allowed.",
    )
    page.paragraph("Any other one is a failure that the message tells.")
    page.section("FILES")
    page.term(f"//{CONFIG}//", "Its settings, lllm3090-config(5).")
    page.term("//~/models//", "The models, a directory each.")
    page.term("//~/.local/state/lllm3090//", "What it has learnt.")
    page.term("//$XDG_RUNTIME_DIR/lllm3090d/control.sock//", "Its control socket.")
    page.term(
        "//lllm3090d.service//, //lllm3090d.socket//, //lllm3090-gateway.socket//, //lllm3090.slice//",
        "Its units of the user's systemd.",
    )
    _see_also(
        page, "lllm3090ctl(1)", "lllm3090-config(5)", f"{BUS_NAME}(5)", "systemd.service(5)", "journalctl(1)"
    )
    return page.text()


def config() -> str:
    """``lllm3090-config(5)``."""
    page = Page("LLLM3090-CONFIG", 5, SOURCE, MANUAL)
    page.section("NAME")
    page.line("lllm3090-config - settings of lllm3090d")
    page.section("SYNOPSIS")
    page.line(f"//{CONFIG}//")
    page.section("DESCRIPTION")
    page.paragraph(
        "A file in TOML with a line `key = value` for each setting. A setting is taken from the environment"
        f" (`{ENVIRONMENT_PREFIX}` and the key in capitals; an empty variable counts as unset), else from the file,"
        " else it has its default."
        f" `{ENVIRONMENT_PREFIX}CONFIG`, or `lllm3090d --config FILE`, names another file. It may be missing."
    )
    page.paragraph(
        "An unknown key or a bad value is an error: the daemon does not start. `lllm3090d --check` reads the settings"
        " and says what is wrong. `systemctl --user reload lllm3090d` has them read again; bad ones are reported, and"
        " the old ones stay."
    )
    page.section("SETTINGS")
    for key in SETTING_KEYS:
        field = Settings.model_fields[key]
        page.term(f"**{key}** = //{unit_or_type(key)}//", _sentence(str(field.description)))
        bounds = allowed(key)
        page.terms_end(
            [" ".join(filter(None, (f"Allowed: {bounds}." if bounds else "", f"Default: `{default(key)}`")))]
        )
    page.section("EXAMPLE")
    page.literal(
        [
            "# One model after another; what is idle for an hour goes.",
            'models_dir = "~/models"',
            "idle_ttl_s = 3600",
            "",
            "[aliases]",
            'big = "qwen3.5-27b"',
        ]
    )
    _see_also(page, "lllm3090d(8)", "lllm3090ctl(1)")
    return page.text()


def bus() -> str:
    """``org.lllm3090.Manager1(5)``."""
    page = Page(BUS_NAME, 5, SOURCE, MANUAL)
    page.section("NAME")
    page.line(f"{BUS_NAME} - the D-Bus interface of lllm3090d")
    page.section("DESCRIPTION")
    page.paragraph(
        f"The daemon is on the bus of its user's session as `{BUS_NAME}`; a call starts it where it does not run."
        " Each model that runs, is on its way or has failed has an object of its own, and each load, unload or release"
        " a job that ends with Completed or Failed. Members and values may be added; nothing is removed and no type"
        " changes."
    )
    for interface in contract().values():
        _interface(page, interface)
    page.section("ERRORS")
    page.paragraph(
        "They have names of their own, such as `org.lllm3090.Error.InsufficientVram`; the message has the arithmetic"
        " and, after a line break, what to do."
    )
    _see_also(page, "lllm3090d(8)", "lllm3090ctl(1)", "busctl(1)")
    return page.text()


def unit_or_type(key: str) -> str:
    """The unit of a setting where its name has one, else its type."""
    return UNITS.get(key.rsplit("_", 1)[-1]) or setting_kind(key)


def default(key: str) -> str:
    """A default as it stands in the file, for anybody's home."""
    value = Settings.model_fields[key].get_default(call_default_factory=True)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, dict):
        return "{}"
    text = str(value).replace(str(runtime_base()), "$XDG_RUNTIME_DIR").replace(str(Path.home()), "~")
    return f'"{text}"'


def _interface(page: Page, interface: Interface) -> None:
    page.section(interface.name)
    page.paragraph(interface.doc)
    if interface.methods:
        page.part(f"Methods of {interface.name}")
        for method in interface.methods.values():
            gives = f" -> {_typed(method.gives)}" if method.gives else ""
            page.term(f"**{method.name}**({_typed(method.takes)}){gives}", method.doc)
    if interface.properties:
        page.part(f"Properties of {interface.name}")
        for each in interface.properties.values():
            page.term(f"**{each.name}** {each.signature}", f"{each.doc} ({_TOLD[each.emits]})")
    if interface.signals:
        page.part(f"Signals of {interface.name}")
        for signal in interface.signals.values():
            page.term(f"**{signal.name}**({_typed(signal.carries)})", signal.doc)


def _typed(arguments: Iterable[Argument]) -> str:
    return ", ".join(f"{each.signature} //{each.name}//" for each in arguments)


def _help(page: Page, text: str) -> None:
    """A help text of click: paragraphs, and behind ``\\b`` lines that stay as they are."""
    for block in re.split(r"\n\s*\n", text.strip()):
        lines = block.splitlines()
        if lines[0].strip() != "\b":
            page.paragraph(block)
            continue
        if lines[1].endswith(":"):
            page.paragraph(lines[1])
            del lines[1]
        page.literal(line.strip() for line in lines[1:])


def _options(page: Page, options: Iterable[Option]) -> None:
    for option in options:
        names = ", ".join(f"**{name}**" for name in option.names)
        value = f" //{option.metavar}//" if option.metavar else ""
        page.term(names + value, option.summary)


def _synopsis(command: Command) -> Iterator[str]:
    if command.commands:
        yield "//COMMAND//"
    if len(command.options) > 1:
        yield "[//OPTIONS//]"
    for argument in command.arguments:
        yield re.sub(r"\w+", lambda word: f"//{word[0]}//", argument.metavar)


def _flag(action: argparse.Action, between: str = " | ") -> str:
    names = between.join(f"**{name}**" for name in action.option_strings)
    return f"{names} //{action.metavar}//" if action.metavar else names


def _see_also(page: Page, *pages: str) -> None:
    page.section("SEE ALSO")
    page.line(", ".join(re.sub(r"^(.*)(\(\d\))$", r"**\1**\2", each) for each in pages))


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]
