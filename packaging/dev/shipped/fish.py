"""The completion for fish. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from shipped.tree import NAMES, Command, Option, Source, Values

HEAD = """\
# fish completion of lllm3090ctl. Made from its commands by: make generated

# The words of the command and the number of arguments behind them: "engine show" 0. Options are left out.
function __lllm3090ctl_where
    set -l skip 0
    set -l path
    set -l position 0
    set -l dashes 0
    for word in (commandline -opc)[2..-1]
        if test $skip = 1
            set skip 0
        else if test $dashes = 1
            set position (math $position + 1)
        else if test "$word" = --
            set dashes 1
        else if string match -q -- '-?*' $word
            contains -- $word $__lllm3090ctl_valued; and set skip 1
        else if contains -- "$path" $__lllm3090ctl_groups
            set path (string join ' ' -- $path $word)
        else
            set position (math $position + 1)
            contains -- "$path" $__lllm3090ctl_passes_on; and set dashes 1
        end
    end
    echo "$path"
    echo $position
    echo $dashes
end

# Behind this command; with a number, where so many arguments stand behind it, or as many and more ("1+"); with a third
# word, behind a double dash.
function __lllm3090ctl_at
    set -l where (__lllm3090ctl_where)
    test "$where[1]" = "$argv[1]"; or return 1
    set -q argv[2]; or return 0
    if set -q argv[3]; and test $where[3] = 0
        return 1
    end
    if string match -q '*+' -- $argv[2]
        test $where[2] -ge (string trim -r -c + -- $argv[2])
    else
        test $where[2] = $argv[2]
    end
end

# An option can stand here.
function __lllm3090ctl_option_at
    set -l where (__lllm3090ctl_where)
    test "$where[1]" = "$argv[1]"; and test $where[3] = 0
end

# The names of a kind, or nothing where the daemon does not run.
function __lllm3090ctl_names
    set -l words (commandline -opc)
    set -l socket
    for index in (seq 2 (count $words))
        if string match -q -- '--socket=*' $words[$index]
            set socket (string replace -- '--socket=' '' $words[$index])
        else if test "$words[$index]" = --socket; and set -q words[(math $index + 1)]
            set socket $words[(math $index + 1)]
        end
    end
    $words[1] --names $argv[1] $socket 2>/dev/null
end

# The command line of its own behind the double dash.
function __lllm3090ctl_program
    set -l words (commandline -opc)
    set -l dashes (contains -i -- -- $words); or return
    if test $dashes = (count $words)
        __fish_complete_command
    else
        complete -C (string join ' ' -- (string escape -- $words[(math $dashes + 1)..-1]) (commandline -ct))
    end
end
"""


def script(root: Command, valued: Iterable[str]) -> str:
    """The file."""
    groups = [each.key for each in root.every() if each.commands]
    passes_on = [each.key for each in root.every() if each.passes_on]
    lists = [
        "",
        f"set -g __lllm3090ctl_valued {' '.join(valued)}",
        f"set -g __lllm3090ctl_groups {' '.join(map(_quoted, groups))}",
        f"set -g __lllm3090ctl_passes_on {' '.join(map(_quoted, passes_on))}",
        "",
        "complete -c lllm3090ctl -f",
    ]
    lines = [line for each in root.every() for line in _lines(each)]
    return HEAD + "\n".join([*lists, *lines]) + "\n"


def _lines(command: Command) -> Iterator[str]:
    yield ""
    at = f"__lllm3090ctl_at {_quoted(command.key)}"
    for below in command.commands:
        yield _line(f"{at} 0", f"-a {below.path[-1]} -d {_quoted(below.summary)}")
    for option in command.options:
        yield _line(f"__lllm3090ctl_option_at {_quoted(command.key)}", _option(option))
    for place, argument in enumerate(command.arguments):
        many = "+" if argument.many else ""
        dashed = " dashed" if argument.dashed else ""
        for words in _words(argument.values):
            yield _line(f"{at} {place}{many}{dashed}", words)


def _line(condition: str, rest: str) -> str:
    return f"complete -c lllm3090ctl -n {_quoted(condition)} {rest}"


def _option(option: Option) -> str:
    names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.names)
    described = f"-d {_quoted(option.summary.partition('. ')[0].rstrip('.'))}"
    if option.metavar is None:
        return f"{names} {described}"
    # -x: a value and no files; -r with -F: a value that is a file.
    kind = "-r -F" if Source.FILES in option.values.sources else "-x"
    return " ".join((names, kind, *(w for w in _words(option.values) if w != "-F"), described))


def _words(values: Values) -> Iterator[str]:
    if values.choices:
        yield f"-a {_quoted(' '.join(values.choices))}"
    for source in values.sources:
        if source in NAMES:
            yield f"-a {_quoted(f'(__lllm3090ctl_names {source})')}"
        elif source is Source.FILES:
            yield "-F"
        else:
            yield "-a '(__lllm3090ctl_program)'"


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
