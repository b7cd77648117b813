"""``config``: what the settings are, and how they are changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from lllm3090ctl import config_check, config_keys, config_views
from lllm3090ctl.client import Client
from lllm3090ctl.config_apply import apply
from lllm3090ctl.config_check import Checked, Setting
from lllm3090ctl.config_edit import Edited, edit
from lllm3090ctl.config_file import ConfigFile
from lllm3090ctl.config_keys import UnclearError
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import Failure, own_failure
from lllm3090ctl.output import Screen
from lllm3090ctl.text import Block, Prose, clean, named

_Function = Callable[..., Any]
_Command = Callable[..., Callable[[_Function], _Function]]

reload_option = click.option(
    "--no-reload",
    "no_reload",
    is_flag=True,
    help="Write the file, but do not have the daemon read it again.",
)
key_argument = click.argument("key", metavar="KEY")


def add_to(group: click.Group, command: _Command) -> None:
    """Add the group ``config`` to the group of all commands; ``command`` makes a function a command's body."""

    @group.group("config")
    def config() -> None:
        """Show and change the settings of the daemon.

        They are in ~/.config/lllm3090/config.toml. A change is checked by the daemon's own rules before it is written,
        leaves comments and order as they are, and is read by the daemon at once; models that run are not disturbed.

        \b
        Examples:
          lllm3090ctl config show --changed
          lllm3090ctl config set cache_type q8_0
        """

    all_option = click.option("--changed", is_flag=True, help="Only those that are not at their default.")
    optional_key = click.argument("key", metavar="[KEY]", required=False)
    values = click.argument("values", metavar="VALUE...", nargs=-1, required=True)
    file = click.argument("file", metavar="[FILE]", required=False)
    config.command("show")(optional_key(all_option(command()(_show))))
    config.command("get")(key_argument(command()(_get)))
    config.command("set")(key_argument(values(reload_option(command()(_set)))))
    config.command("unset")(key_argument(reload_option(command()(_unset))))
    config.command("edit")(reload_option(command()(_edit)))
    config.command("check")(file(command()(_check)))
    config.command("schema")(command()(_schema))


def _show(_client: Client, screen: Screen, *, key: str | None, changed: bool) -> int:
    """Show what counts, where it comes from, and from when a change of it would count.

    ORIGIN is default, file, or environment: a variable of the daemon, which outranks the file.

    \b
    Examples:
      lllm3090ctl config show
      lllm3090ctl config show --changed
      lllm3090ctl config show cache_type
    """
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


def _get(_client: Client, screen: Screen, *, key: str) -> int:
    """Print the value that counts: a text as it is, all else as JSON.

    \b
    Examples:
      lllm3090ctl config get cache_type
      lllm3090ctl config get aliases.qwen
    """
    checked = config_check.check()
    checked.require_valid(checked.file)
    setting, path = _place(checked, key)
    value = config_keys.found_in({setting.key: setting.value}, path)
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


def _set(_client: Client, screen: Screen, *, key: str, values: tuple[str, ...], no_reload: bool) -> int:
    """Change a setting.

    KEY is a setting, or a name in one that is a table: aliases.qwen. A list takes several VALUEs; those that begin
    with a dash go after --.

    \b
    Examples:
      lllm3090ctl config set cache_type q8_0
      lllm3090ctl config set aliases.qwen Qwen3.8-27B
      lllm3090ctl config set idle_ttl_of.Qwen3.8-27B 600
      lllm3090ctl config set extra_arguments.Qwen3.8-27B -- --threads 8
    """
    from lllm3090ctl.config_text import with_value  # noqa: PLC0415 - slow, and only needed here

    checked = config_check.check()

    def change(text: str) -> str:
        setting, path = _place(checked, key)
        value = config_keys.value_of([named(each) for each in values], setting.shape.below(path[1:]))
        return with_value(text, path, value)

    return _change(screen, checked, key, change, no_reload)


def _unset(_client: Client, screen: Screen, *, key: str, no_reload: bool) -> int:
    """Take a setting out of the file, so that its default counts.

    \b
    Examples:
      lllm3090ctl config unset cache_type
      lllm3090ctl config unset aliases.qwen
    """
    from lllm3090ctl.config_text import without  # noqa: PLC0415 - slow, and only needed here

    checked = config_check.check()

    def change(text: str) -> str:
        # What is no setting (any more) can be taken out too.
        path = _place(checked, key)[1] if key.partition(".")[0] in checked.settings else (key,)
        shorter = without(text, path)
        if shorter == text and path[0] not in checked.settings:
            checked.named(path[0])
        return shorter

    return _change(screen, checked, key, change, no_reload)


def _edit(_client: Client, screen: Screen, *, no_reload: bool) -> int:
    """Edit the file with $VISUAL or $EDITOR.

    You edit a copy. It is checked when you leave the editor: what is not valid can be edited again or given up, and
    never takes the place of the file.

    \b
    Example:
      lllm3090ctl config edit
    """
    before = config_check.check()
    file = ConfigFile(before.file)
    raw = file.read()

    def tell(checked: Checked) -> None:
        for problem in checked.problems:
            click.echo(clean(problem.replace(config_check.STDIN, file.shown)), err=True)

    def put(edited: Edited) -> None:
        with file.locked():
            file.replace(edited.raw, raw)
        _tell(screen, before, edited.checked, file, no_reload)

    first = raw if raw is not None else config_views.template(before.settings.values()).encode()
    if not edit(first, config_check.check_text, tell, put):
        _unchanged(screen, file)
    return ExitStatus.OK


def _check(_client: Client, screen: Screen, *, file: str | None) -> int:
    """Check the file, or another one, by the daemon's own rules; nothing is changed.

    Variables of the daemon are checked with it. The exit status is 78 where something is wrong.

    \b
    Examples:
      lllm3090ctl config check
      lllm3090ctl config check new.toml
    """
    checked = config_check.check(file)
    shown = named(file) if file is not None else checked.file
    checked.require_valid(shown)
    there = "valid." if checked.exists else "not there: defaults apply."
    told = {"file": shown, "exists": checked.exists, "environment": checked.environment, "problems": []}
    screen.result(told, [Prose(f"{clean(shown)} is {there}"), *config_views.whose(checked)])
    return ExitStatus.OK


def _schema(_client: Client, screen: Screen) -> int:
    """Print the JSON schema of the file, for editors that check and complete while you type.

    \b
    Example:
      lllm3090ctl config schema > ~/.config/lllm3090/config.schema.json
    """
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
        *config_views.changes(after, [*changed, *outranked], applied),
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
