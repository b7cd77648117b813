"""What the commands of ``config`` do. Imported when one is given: it is slow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import click

from lllm3090ctl import config_check, config_keys, config_views
from lllm3090ctl.config_apply import apply
from lllm3090ctl.config_check import Checked, Setting
from lllm3090ctl.config_edit import Edited
from lllm3090ctl.config_edit import edit as edited
from lllm3090ctl.config_file import ConfigFile
from lllm3090ctl.config_keys import UnclearError
from lllm3090ctl.config_text import has, with_value, without
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import Failure, own_failure
from lllm3090ctl.output import Screen
from lllm3090ctl.text import Block, Prose, clean, named


def show(screen: Screen, key: str | None, *, changed: bool) -> int:
    """What ``config show`` does."""
    checked = config_check.check()
    checked.require_valid(checked.file)
    shown = list(checked.settings.values()) if key is None else [checked.named(key)]
    if changed:
        shown = [each for each in shown if each.origin != "default"]
    if not screen.as_json:
        screen.result({}, config_views.table(checked, shown))
        return ExitStatus.OK
    keys = {each.key for each in shown}
    listed = checked.document["settings"]
    assert isinstance(listed, list)  # noqa: S101 - it was read as one
    screen.result(
        dict(checked.document) | {"settings": [each for each in listed if each["key"] in keys]}, []
    )
    return ExitStatus.OK


def get(screen: Screen, key: str) -> int:
    """What ``config get`` does."""
    checked = config_check.check()
    checked.require_valid(checked.file)
    setting, path = _place(checked, key)
    value = config_keys.found_in({setting.key: setting.value}, path)
    if value is None:  # all of a section: names of models have dots
        name, _, rest = named(key).partition(".")
        value = config_keys.found_in({setting.key: setting.value}, (name, rest))
    if value is None:
        raise own_failure(
            "not_set",
            "There is no value",
            f"{setting.key} has nothing by that name.",
            exit_status=ExitStatus.NOT_FOUND,
            hint=f"What it has: lllm3090ctl config get {setting.key}",
        )
    document = {"key": key, "value": value, "origin": setting.origin, "takes_effect": setting.takes_effect}
    screen.result(document, [config_views.value_text(value)])
    return ExitStatus.OK


def put(screen: Screen, key: str, values: Sequence[str], *, no_reload: bool) -> int:
    """What ``config set`` does."""
    checked = config_check.check()

    def change(text: str) -> str:
        setting, path = _place(checked, key)
        value = config_keys.value_of([named(each) for each in values], setting.shape.below(path[1:]))
        return with_value(text, path, value)

    return _change(screen, checked, key, change, no_reload)


def unset(screen: Screen, key: str, *, no_reload: bool) -> int:
    """What ``config unset`` does."""
    checked = config_check.check()

    def change(text: str) -> str:
        # What is no setting (any more) can be taken out too.
        path = _place(checked, key)[1] if key.partition(".")[0] in checked.settings else (key,)
        name, _, rest = named(key).partition(".")
        if not has(text, path) and rest and has(text, (name, rest)):
            path = (name, rest)  # all of a section: names of models have dots
        shorter = without(text, path)
        if shorter == text and path[0] not in checked.settings:
            checked.named(path[0])
        return shorter

    return _change(screen, checked, key, change, no_reload)


def edit(screen: Screen, *, no_reload: bool) -> int:
    """What ``config edit`` does."""
    before = config_check.check()
    file = ConfigFile(before.file)
    raw = file.read()

    def tell(checked: Checked) -> None:
        for problem in checked.problems:
            click.echo(clean(problem.replace(config_check.STDIN, file.shown)), err=True)

    def apply_it(made: Edited) -> None:
        with file.locked():
            file.replace(made.raw, raw)
        _tell(screen, before, made.checked, file, no_reload)

    first = raw if raw is not None else config_views.template(before.settings.values()).encode()
    if not edited(first, config_check.check_text, tell, apply_it):
        _unchanged(screen, file)
    return ExitStatus.OK


def check(screen: Screen, file: str | None) -> int:
    """What ``config check`` does."""
    checked = config_check.check(file)
    shown = named(file) if file is not None else checked.file
    checked.require_valid(shown)
    there = "valid." if checked.exists else "not there: defaults apply."
    told = {"file": shown, "exists": checked.exists, "environment": checked.environment, "problems": []}
    screen.result(told, [Prose(f"{clean(shown)} is {there}"), *config_views.whose(checked)])
    return ExitStatus.OK


def schema() -> int:
    """What ``config schema`` does."""
    Screen(as_json=True).result(config_check.schema().members, [])
    return ExitStatus.OK


def _place(checked: Checked, key: str) -> tuple[Setting, tuple[str, ...]]:
    setting = checked.named(named(key).partition(".")[0])
    try:
        return setting, config_keys.path_of(named(key), setting.depth)
    except UnclearError as error:
        raise _unclear(str(error)) from error


def _change(screen: Screen, before: Checked, key: str, change: Callable[[str], str], no_reload: bool) -> int:
    """Change the file's text; checked before it is written, and from reading to writing one at a time."""
    file = ConfigFile(before.file)
    with file.locked():
        raw = file.read()
        try:
            text = (raw or b"").decode()
            changed = change(text)
        except (UnclearError, UnicodeDecodeError) as error:
            raise _unclear(
                f"{error}" if isinstance(error, UnclearError) else f"It is no UTF-8: {error}"
            ) from error
        if changed == text:
            return _unchanged(screen, file)
        checked = config_check.check_text(changed.encode())
        if checked.problems:
            raise config_check.invalid(checked, file.shown, untouched=True)
        file.replace(changed.encode(), raw)
    return _tell(screen, before, checked, file, no_reload, key=key)


def _tell(
    screen: Screen, before: Checked, after: Checked, file: ConfigFile, no_reload: bool, *, key: str = ""
) -> int:
    """Have the daemon read the file, and say what counts when; of a key that was given, also that it does not."""
    applied = apply(not no_reload)
    changed = config_views.changed(before.settings, after.settings)
    given = after.settings.get(key.partition(".")[0])
    outranked = (
        [given] if given is not None and given.origin == "environment" and given not in changed else []
    )
    document = {
        "file": file.shown,
        "applied": applied,
        "changed": [
            {"key": each.key, "value": each.value, "origin": each.origin, "takes_effect": each.takes_effect}
            for each in changed
        ],
    }
    blocks: Sequence[Block] = [
        Prose(f"{clean(file.shown)} was written."),
        *config_views.changes(after, [*changed, *outranked], applied, before.settings),
    ]
    screen.result(document, blocks)
    return ExitStatus.OK


def _unchanged(screen: Screen, file: ConfigFile) -> int:
    document = {"file": file.shown, "applied": "left", "changed": []}
    screen.result(document, [Prose(f"{clean(file.shown)} is as it was.")])
    return ExitStatus.OK


def _unclear(why: str) -> Failure:
    return own_failure(
        "config_unclear",
        "The change is not clear",
        f"{why} Nothing was changed.",
        exit_status=ExitStatus.USAGE,
        hint="See: lllm3090ctl config set --help\nor do it by hand: lllm3090ctl config edit",
    )
