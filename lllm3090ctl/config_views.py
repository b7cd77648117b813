"""Settings for a person: what counts and where it is from, and when a change does. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from lllm3090ctl.config_check import Checked, Setting
from lllm3090ctl.text import Block, Column, Prose, Style, Table, clean

COLUMNS = (
    Column("SETTING"),
    Column("VALUE", least=20),
    Column("UNIT", drop=2),
    Column("ORIGIN"),
    Column("COUNTS FROM", drop=1),
)
RESTART = "systemctl --user restart lllm3090d"
COUNTS_FROM = {
    "now": "now",
    "next-load": "the next load of a model",
    "next-login": "the next login",
    "next-start": "the next start of the daemon",
}
ADVICE = {
    "next-load": "Models that run keep what they were started with: unload and load those that are to have it.",
    "next-login": "What is loaded now stays as it is.",
    "next-start": f"Restart it; models go on running: {RESTART}",
}
SECTIONS = "models"
# What a section says that counts from when the setting does which says it of all models.
AS_SETTING = {"aliases": "aliases", "idle_ttl_s": "idle_ttl_of", "autoload": "autoload"}
WHOSE = {
    "manager": "The daemon does not run; its variables are those that systemd would start it with.",
    "shell": "Variables were taken from this shell, as systemd could not be asked for those of the daemon.",
}


def value_text(value: object) -> str:
    """A value as it is typed: texts bare, all else as JSON."""
    return clean(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def table(checked: Checked, settings: Sequence[Setting]) -> list[Block]:
    """What ``config show`` shows."""
    rows = tuple(
        (
            each.key,
            value_text(each.value) or '""',
            each.unit or "-",
            each.origin or "-",
            COUNTS_FROM.get(each.takes_effect, each.takes_effect),
        )
        for each in settings
    )
    blocks: list[Block] = [Table(COLUMNS, rows)] if rows else [Prose("Every setting has its default.")]
    there = "" if checked.exists else " (not there: defaults apply)"
    blocks += ["", Prose(f"File: {clean(checked.file)}{there}")]
    return [*blocks, *whose(checked)]


def whose(checked: Checked) -> list[Block]:
    """Whose variables counted, where those are not the running daemon's."""
    return [Prose(WHOSE[checked.environment])] if checked.environment in WHOSE else []


def changes(
    checked: Checked, settings: Iterable[Setting], applied: str, before: Mapping[str, Setting]
) -> list[Block]:
    """From when changed settings count.

    Args:
        checked: after the change.
        settings: those that were changed, as they are now.
        applied: one of :data:`lllm3090ctl.config_apply.APPLIED`.
        before: all settings before the change.
    """
    blocks: list[Block] = []
    counting: dict[str, list[str]] = {}
    for each in settings:
        if each.origin == "environment":
            said = f"{each.variable} is set to {value_text(each.value)} in the daemon's environment"
            blocks.append(Prose(f"{said}, and outranks the file.", style=Style.DOUBTFUL))
        elif each.key == SECTIONS:
            for member in _changed_members(before.get(SECTIONS), each):
                takes_effect = (
                    checked.settings[AS_SETTING[member]].takes_effect if member in AS_SETTING else ""
                )
                counting.setdefault(takes_effect or each.takes_effect, []).append(f"{SECTIONS} ({member})")
        else:
            counting.setdefault(each.takes_effect, []).append(each.key)
    for takes_effect, keys in counting.items() if applied == "reloaded" else ():
        names = keys[0] if len(keys) == 1 else f"{', '.join(keys[:-1])} and {keys[-1]}"
        when = f"count{'s' if len(keys) == 1 else ''} from {COUNTS_FROM.get(takes_effect, takes_effect)}."
        blocks.append(Prose(" ".join(filter(None, (names, when, ADVICE.get(takes_effect))))))
    if applied == "not_running":
        blocks.append(Prose("The daemon does not run: it will read this at its start."))
    elif applied == "left":
        blocks.append(Prose("The daemon has not been told: systemctl --user reload lllm3090d"))
    return [*blocks, *(whose(checked) if checked.environment == "shell" else [])]


def _changed_members(before: Setting | None, now: Setting) -> list[str]:
    """What sections of models say otherwise than before, by the names of members."""
    found: set[str] = set()
    old, new = (each.value if each and isinstance(each.value, Mapping) else {} for each in (before, now))
    for name in old.keys() | new.keys():
        was, now_is = old.get(name, {}), new.get(name, {})
        found |= {member for member in was.keys() | now_is.keys() if was.get(member) != now_is.get(member)}
    return sorted(found)


def changed(before: Mapping[str, Setting], after: Mapping[str, Setting]) -> list[Setting]:
    """Settings with another value or origin, as they are now."""
    return [
        each
        for key, each in after.items()
        if key not in before or (before[key].value, before[key].origin) != (each.value, each.origin)
    ]


def template(settings: Iterable[Setting]) -> str:
    """A file to begin with: every setting, commented out, with its default."""
    lines = [
        "# Settings of lllm3090d. Take away the # before what you change; each line shows the default.",
        "# Tables, such as aliases, may be written below a line [aliases] at the end.",
    ]
    for each in settings:
        facts = ", ".join(filter(None, (each.unit, each.allowed or _words(each.shape.kind))))
        counts = COUNTS_FROM.get(each.takes_effect, each.takes_effect)
        lines += [
            "",
            f"# {each.description} ({facts + '; ' if facts else ''}counts from {counts})",
            f"# {each.key} = {_literal(each.default)}",
        ]
    return "\n".join(lines) + "\n"


def _words(kind: str) -> str:
    return kind if "|" in kind else ""


def _literal(value: object) -> str:
    """As TOML; the texts of JSON and of TOML are written alike."""
    return "{}" if isinstance(value, Mapping) else json.dumps(value)
