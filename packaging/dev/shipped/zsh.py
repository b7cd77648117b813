"""The completion for zsh. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from shipped.tree import NAMES, Argument, Command, Option, Source, Values

HEAD = """\
#compdef lllm3090ctl
# zsh completion of lllm3090ctl. Made from its commands by: make generated

# The names of a kind, which is the last argument, or nothing where the daemon does not run.
_lllm3090ctl_names() {
  local kind=$argv[-1] socket=${(Q)_lllm3090ctl_options[--socket]} program=$_lllm3090ctl_program
  local -a names
  argv[-1]=()
  names=(${(f)"$(${(Q)~program} --names $kind ${socket:+${~socket}} 2>/dev/null)"})
  # In whatever case.
  (( $#names )) && compadd -M 'm:{[:lower:][:upper:]}={[:upper:][:lower:]}' "$@" -a names
}

# Files, where a double dash stands before.
_lllm3090ctl_dashed_files() {
  (( ${words[(I)--]} )) && _files "$@"
}

# The command line of its own behind the double dash.
_lllm3090ctl_program() {
  local dashes=${words[(i)--]}
  (( dashes < CURRENT )) || return 1
  shift $dashes words
  (( CURRENT -= dashes ))
  _normal
}
"""
TAIL = """
_lllm3090ctl_program=${words[1]:-lllm3090ctl}
typeset -gA _lllm3090ctl_options
_lllm3090ctl_options=()
_lllm3090ctl "$@"
"""
_ACTIONS = {Source.FILES: "_files", Source.PROGRAM: "_lllm3090ctl_program"}


def script(root: Command) -> str:
    """The file."""
    functions = (line for each in root.every() for line in _function(each))
    return HEAD + "\n".join((*_alternatives(root), *functions)) + TAIL


def _name(command: Command) -> str:
    return "_".join(("_lllm3090ctl", *command.path))


def _function(command: Command) -> Iterator[str]:
    yield ""
    yield f"{_name(command)}() {{"
    specs = [_option(option) for option in command.options]
    if command.commands:
        yield "  local curcontext=$curcontext state line ret=1"
        yield "  typeset -A opt_args"
        yield "  local -a subcommands"
        yield "  subcommands=("
        for below in command.commands:
            yield f"    {_quoted(f'{below.path[-1]}:{below.summary}')}"
        yield "  )"
        specs += ["'1: :->command'", "'*:: :->arguments'"]
        yield "  _arguments -C -S \\"
        yield " \\\n".join(f"    {spec}" for spec in specs) + " && ret=0"
        yield "  case $state in"
        yield "    command) _describe -t commands command subcommands && ret=0 ;;"
        yield "    arguments)"
        if not command.path:
            yield "      _lllm3090ctl_options=(${(kv)opt_args})"
        yield "      case $line[1] in"
        for below in command.commands:
            yield f"        {below.path[-1]}) {_name(below)} && ret=0 ;;"
        yield "      esac"
        yield "      ;;"
        yield "  esac"
        yield "  return ret"
    else:
        specs += [_argument(place, argument) for place, argument in enumerate(command.arguments, 1)]
        # -S: no options behind a double dash; -A: none behind the first argument.
        stops = "-S -A '-*'" if command.passes_on else "-S"
        yield f"  _arguments {stops} \\"
        yield " \\\n".join(f"    {spec}" for spec in specs)
    yield "}"


def _option(option: Option) -> str:
    described = f"[{_escaped(option.summary.partition('. ')[0].rstrip('.'))}]"
    value = ""
    if option.metavar is not None:
        value = f":{_escaped(option.metavar)}:{_action(option.values)}"
    specs = [_spelt(name, option.metavar is not None) for name in option.names]
    if len(specs) == 1:
        return _quoted(specs[0] + described + value)
    excluded = _quoted(f"({' '.join(option.names)})")
    return f"{excluded}{{{','.join(_quoted(spec) for spec in specs)}}}{_quoted(described + value)}"


def _spelt(name: str, takes_value: bool) -> str:
    """A long option takes its value behind = or a blank, a short one behind a blank or nothing."""
    if not takes_value:
        return name
    return f"{name}=" if name.startswith("--") else f"{name}+"


def _argument(place: int, argument: Argument) -> str:
    label = _escaped(argument.metavar.strip("[]").removeprefix("-- ").rstrip("."))
    if argument.many:
        if Source.PROGRAM in argument.values.sources:
            return _quoted(f"*::{label}:{_action(argument.values)}")
        dashed = argument.dashed and argument.values.sources == (Source.FILES,)
        return _quoted(f"*:{label}:{'_lllm3090ctl_dashed_files' if dashed else _action(argument.values)}")
    optional = ":" if argument.metavar.startswith("[") else ""
    return _quoted(f"{place}:{optional}{label}:{_action(argument.values)}")


def _action(values: Values) -> str:
    if values.choices:
        return f"({' '.join(values.choices)})"
    actions = [f"_lllm3090ctl_names {s}" if s in NAMES else _ACTIONS[s] for s in values.sources]
    if not actions:
        return " "
    if len(actions) == 1:
        return actions[0]
    return _several(values)


def _several(values: Values) -> str:
    return "_".join(("_lllm3090ctl", *values.sources))


def _alternatives(root: Command) -> Iterator[str]:
    """A function for each set of sources that are offered together."""
    places = {argument.values for each in root.every() for argument in each.arguments}
    for values in sorted((each for each in places if len(each.sources) > 1), key=_several):
        yield ""
        yield f"{_several(values)}() {{"
        tags = [f"{each}:{each}:{_action(Values(sources=(each,)))}" for each in values.sources]
        yield f"  _alternative {' '.join(map(_quoted, tags))}"
        yield "}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("[", r"\[").replace("]", r"\]").replace(":", r"\:")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
