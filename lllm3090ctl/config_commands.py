"""``config``: what the settings are, and how they are changed."""

from __future__ import annotations

import click

from lllm3090ctl.client import Client
from lllm3090ctl.command_parts import command_body
from lllm3090ctl.output import Screen

reload_option = click.option(
    "--no-reload",
    "no_reload",
    is_flag=True,
    help="Write the file, but do not have the daemon read it again.",
)
key_argument = click.argument("key", metavar="KEY")


def add_to(group: click.Group) -> None:
    """Add the group ``config`` to the group of all commands."""

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
    config.command("show")(optional_key(all_option(command_body()(_show))))
    config.command("get")(key_argument(command_body()(_get)))
    config.command("set")(key_argument(values(reload_option(command_body()(_set)))))
    config.command("unset")(key_argument(reload_option(command_body()(_unset))))
    config.command("edit")(reload_option(command_body()(_edit)))
    config.command("check")(file(command_body()(_check)))
    config.command("schema")(command_body()(_schema))


def _show(_client: Client, screen: Screen, *, key: str | None, changed: bool) -> int:
    """Show what counts, where it comes from, and from when a change of it would count.

    ORIGIN is default, file, or environment: a variable of the daemon, which outranks the file.

    \b
    Examples:
      lllm3090ctl config show
      lllm3090ctl config show --changed
      lllm3090ctl config show cache_type
    """
    from lllm3090ctl import config_actions  # noqa: PLC0415 - slow, and only needed here

    return config_actions.show(screen, key, changed=changed)


def _get(_client: Client, screen: Screen, *, key: str) -> int:
    """Print the value that counts: a text as it is, all else as JSON.

    \b
    Examples:
      lllm3090ctl config get cache_type
      lllm3090ctl config get aliases.qwen
    """
    from lllm3090ctl import config_actions  # noqa: PLC0415 - slow, and only needed here

    return config_actions.get(screen, key)


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
    from lllm3090ctl import config_actions  # noqa: PLC0415 - slow, and only needed here

    return config_actions.put(screen, key, values, no_reload=no_reload)


def _unset(_client: Client, screen: Screen, *, key: str, no_reload: bool) -> int:
    """Take a setting out of the file, so that its default counts.

    Of a table also a part of it, or the section of a model. A table that is empty then goes too, unless a comment
    stands in it or above it.

    \b
    Examples:
      lllm3090ctl config unset cache_type
      lllm3090ctl config unset aliases.qwen
      lllm3090ctl config unset models.Qwen3.8-27B
    """
    from lllm3090ctl import config_actions  # noqa: PLC0415 - slow, and only needed here

    return config_actions.unset(screen, key, no_reload=no_reload)


def _edit(_client: Client, screen: Screen, *, no_reload: bool) -> int:
    """Edit the file with $VISUAL or $EDITOR.

    You edit a copy. It is checked when you leave the editor: what is not valid can be edited again or given up, and
    never takes the place of the file.

    \b
    Example:
      lllm3090ctl config edit
    """
    from lllm3090ctl import config_actions  # noqa: PLC0415 - slow, and only needed here

    return config_actions.edit(screen, no_reload=no_reload)


def _check(_client: Client, screen: Screen, *, file: str | None) -> int:
    """Check the file, or another one, by the daemon's own rules; nothing is changed.

    Variables of the daemon are checked with it. The exit status is 78 where something is wrong.

    \b
    Examples:
      lllm3090ctl config check
      lllm3090ctl config check new.toml
    """
    from lllm3090ctl import config_actions  # noqa: PLC0415 - slow, and only needed here

    return config_actions.check(screen, file)


def _schema(_client: Client, screen: Screen) -> int:
    """Print the JSON schema of the file, for editors that check and complete while you type.

    \b
    Example:
      lllm3090ctl config schema > ~/.config/lllm3090/config.schema.json
    """
    from lllm3090ctl import config_actions  # noqa: PLC0415 - slow, and only needed here

    return config_actions.schema()
