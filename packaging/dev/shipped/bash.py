"""The completion for bash. It needs nothing of the package bash-completion, but uses it for ``run``. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator

from shipped.tree import NAMES, Argument, Command, Source, Values

HEAD = r"""# bash completion of lllm3090ctl. Made from its commands by: make generated

# The names of a kind that begin with what was typed, in whatever case, or nothing where the daemon does not run.
_lllm3090ctl_names() {
  local name typed=${current//\\/} quote=''
  case $current in [\"\']*) quote=${current:0:1} typed=${current:1} ;; esac
  while IFS= read -r name; do
    [[ ${name,,} == "${typed,,}"* ]] || continue
    # In quotes that are open already, only what would end them is different.
    # shellcheck disable=SC2001 # what & means in a replacement depends on the release of bash
    case $quote in
      "'") name=${name//\'/\'\\\'\'} ;;
      '"') name=$(sed 's/[\\"$`]/\\&/g' <<<"$name") ;;
      *) printf -v name %q "$name" ;;
    esac
    COMPREPLY+=("$name")
  done < <("$program" --names "$1" ${socket:+"$socket"} 2>/dev/null)
}

_lllm3090ctl_files() {
  compopt -o filenames 2>/dev/null
  local file
  while IFS= read -r file; do COMPREPLY+=("$file"); done < <(compgen -f -- "$current")
}

# A command line of its own, from the word of this number.
_lllm3090ctl_program() {
  local file
  if declare -F _command_offset >/dev/null; then
    _command_offset "$1"
  elif ((COMP_CWORD == $1)); then
    while IFS= read -r file; do COMPREPLY+=("$file"); done < <(compgen -c -- "$current")
  else
    _lllm3090ctl_files
  fi
}

_lllm3090ctl_words() {
  local word
  for word in $1; do [[ $word != "$current"* ]] || COMPREPLY+=("$word"); done
}

"""
TAIL = r"""
_lllm3090ctl() {
  local program=${1/#\~/$HOME} socket='' current previous='' path='' commands='' options='' passes_on='' places=()
  local words=() rest=$COMP_LINE before word index position=0 dashes=0 program_at=0 value=0 prefix=''
  COMPREPLY=()
  # What readline splits at = and : is put together again.
  for ((index = 0; index <= COMP_CWORD; index++)); do
    word=${COMP_WORDS[index]}
    before=
    if [[ -n $word ]]; then
      before=${rest%%"$word"*}
    elif [[ $rest == [[:blank:]]* ]]; then
      before=${rest:0:1}
    fi
    rest=${rest#"$before$word"}
    if ((index == 0)) || [[ -n $before ]]; then words+=("$word"); else words[${#words[@]} - 1]+=$word; fi
    # Of a command line of its own, the first word.
    if ((dashes && !program_at)); then program_at=$index; fi
    [[ $word != -- ]] || dashes=1
  done
  current=${words[${#words[@]} - 1]}
  dashes=0
  _lllm3090ctl_at ''
  for ((index = 1; index < ${#words[@]} - 1; index++)); do
    word=${words[index]}
    if ((value)); then
      value=0
      [[ $previous != --socket ]] || socket=$word
    elif ((dashes)); then
      ((position++))
    elif [[ $word == -- ]]; then
      dashes=1
    elif [[ $word == --socket=* ]]; then
      socket=${word#*=}
    elif [[ $word == -?* ]]; then
      previous=$word
      case " $_LLLM3090CTL_VALUED " in *" $word "*) value=1 ;; esac
    elif [[ -n $commands ]]; then
      path+=${path:+ }$word
      _lllm3090ctl_at "$path" || return 0
    else
      ((position++))
      [[ -z $passes_on ]] || dashes=1
    fi
  done
  if ((value == 0 && dashes == 0)) && [[ $current == --*=* ]]; then
    previous=${current%%=*}
    current=${current#*=}
    value=1
    [[ $COMP_WORDBREAKS == *=* ]] || prefix=$previous=
  fi
  # A tilde and variables are expanded by the shell only when the command runs.
  socket=${socket/#\~/$HOME}
  if ((value)); then
    _lllm3090ctl_value "$path" "$previous"
  elif ((dashes == 0)) && [[ $current == -* ]]; then
    _lllm3090ctl_words "$options"
  elif [[ -n $commands ]]; then
    _lllm3090ctl_words "$commands"
  elif ((${#places[@]})); then
    ((position < ${#places[@]})) || position=$((${#places[@]} - 1))
    for word in ${places[position]}; do
      case $word in
        files) _lllm3090ctl_files ;;
        dashed) ((dashes)) || break ;;
        program) _lllm3090ctl_program "$program_at" ;;
        nothing) ;;
        =*) _lllm3090ctl_words "${word#=}" ;;
        *) _lllm3090ctl_names "$word" ;;
      esac
    done
  fi
  # Only what stands behind the last : is replaced.
  if [[ $current == *:* && $COMP_WORDBREAKS == *:* ]]; then
    before=${current%"${current##*:}"}
    for index in "${!COMPREPLY[@]}"; do COMPREPLY[index]=${COMPREPLY[index]:${#before}}; done
  fi
  if [[ -n $prefix ]]; then
    for index in "${!COMPREPLY[@]}"; do COMPREPLY[index]=$prefix${COMPREPLY[index]}; done
  fi
}

complete -F _lllm3090ctl lllm3090ctl
"""


def script(root: Command, valued: Iterable[str]) -> str:
    """The file."""
    return (
        HEAD + "\n".join((f"_LLLM3090CTL_VALUED={shlex.quote(' '.join(valued))}", "", *_tables(root))) + TAIL
    )


def _tables(root: Command) -> Iterator[str]:
    yield "# What can stand behind a command: options, and commands below it or arguments."
    yield "_lllm3090ctl_at() {"
    yield "  commands='' options='' passes_on='' places=()"
    yield "  case $1 in"
    for each in root.every():
        yield f"    {shlex.quote(each.key)})"
        yield f"      options={shlex.quote(' '.join(name for option in each.options for name in option.names))}"
        if each.commands:
            yield f"      commands={shlex.quote(' '.join(below.path[-1] for below in each.commands))}"
        if each.arguments:
            places = [shlex.quote(_place(argument)) for argument in each.arguments]
            # Behind the last one there is nothing, unless it takes all.
            places += [] if each.arguments[-1].many else ["nothing"]
            yield f"      places=({' '.join(places)})"
        if each.passes_on:
            yield "      passes_on=yes"
        yield "      ;;"
    yield "    *) return 1 ;;"
    yield "  esac"
    yield "}"
    yield ""
    yield "# What an option takes."
    yield "_lllm3090ctl_value() {"
    yield '  case "$1 $2" in'
    for each in root.every():
        for option in each.options:
            if option.metavar is not None and (option.values.choices or option.values.sources):
                patterns = " | ".join(shlex.quote(f"{each.key} {name}") for name in option.names)
                yield f"    {patterns}) {_offer(option.values)} ;;"
    yield "  esac"
    yield "}"


def _place(argument: Argument) -> str:
    choices = (f"={choice}" for choice in argument.values.choices)
    words = (*(("dashed",) if argument.dashed else ()), *argument.values.sources, *choices)
    return " ".join(words) or "nothing"


def _offer(values: Values) -> str:
    if values.choices:
        return f"_lllm3090ctl_words {shlex.quote(' '.join(values.choices))}"
    return "; ".join(
        f"_lllm3090ctl_names {source}" if source in NAMES else "_lllm3090ctl_files"
        for source in values.sources
        if source is not Source.PROGRAM
    )
