"""Which words about reasoning a chat template reads: found in its Jinja source, nothing is executed. Pure.

Only what stands there counts, so a word may be missed but none is made up: a variable must be read before the
template sets it itself, and a level must be compared with it, or be its default.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

# Variables by which published templates let a request say how to reason (``chat_template_kwargs``).
SWITCHES = (
    "enable_thinking",
    "thinking",
    "reasoning_effort",
    "thinking_effort",
    "thinking_mode",
    "reasoning_mode",
    "thinking_budget",
    "reasoning_budget",
    "preserve_thinking",
    "clear_thinking",
)
# Words in a message that a template looks for.
SOFT_SWITCHES = ("/think", "/no_think", "/nothink")
MAX_LEVELS = 16  # of one switch; published templates have at most five
# Of a list or of arguments; what is longer is cut, so that nothing is searched for long.
MAX_LIST_TOKENS = 64
MAX_FILTERS = 6  # on one variable, one behind the other; a longer chain is left where it is

_LEVEL = re.compile(r"[A-Za-z0-9_-]{1,32}", re.ASCII)
_OPENING = re.compile(r"\{[{%#]")
# Possessive, so that a hostile template costs linear time.
_TOKEN = re.compile(
    r"""\s*+(?:(?P<text>"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+')|(?P<name>[A-Za-z_]\w*+)|(?P<sign>-?[%}]\}|[=!]=|.))""",
    re.DOTALL | re.ASCII,
)
_SEARCHES = frozenset({"endswith", "startswith", "replace", "split", "find", "rfind", "count"})
_BRACKETS = {"[": "]", "(": ")", "{": "}"}


@dataclass(frozen=True, slots=True)
class _Token:
    """A string (its contents), a name, or a sign, which operators and punctuation are."""

    kind: str
    text: str

    def is_sign(self, *signs: str) -> bool:
        return self.kind == "sign" and self.text in signs

    def is_name(self, *names: str) -> bool:
        return self.kind == "name" and self.text in names


_END = _Token("sign", "")


def reasoning_words(template: str) -> tuple[str, ...]:
    """The variables it reads, each followed by the levels it knows, then the words it looks for in messages.

    ``("enable_thinking", "reasoning_effort", "reasoning_effort=low", "reasoning_effort=high", "/no_think")``,
    for example; empty where it lets nobody choose. Takes linear time.
    """
    if not any(word in template for word in (*SWITCHES, *SOFT_SWITCHES)):
        return ()
    blocks = list(_blocks(template))
    words: list[str] = []
    for switch in SWITCHES:
        if _is_read(switch, blocks):
            words += [switch, *(f"{switch}={level}" for level in _levels(switch, blocks))]
    looked_for = {word for block in blocks for word in _looked_for(block)}
    return (*words, *(word for word in SOFT_SWITCHES if word in looked_for))


def _blocks(template: str) -> Iterator[list[_Token]]:
    """The tokens of each expression and statement; stops where the template is broken."""
    position = 0
    while (opening := _OPENING.search(template, position)) is not None:
        if opening[0] == "{#":
            end = template.find("#}", opening.end())
            if end < 0:
                return
            position = end + 2
            continue
        tokens, position = _block(template, opening.end())
        yield tokens
        if position < 0:
            return


def _block(template: str, position: int) -> tuple[list[_Token], int]:
    """Tokens of a block, and where it ends; -1 where it does not."""
    tokens: list[_Token] = []
    depth = 0
    while (match := _TOKEN.match(template, position)) is not None:
        position = match.end()
        kind = str(match.lastgroup)
        text = match[kind]
        if kind == "text":
            tokens.append(_Token(kind, text[1:-1]))
            continue
        if text in ('"', "'"):
            break
        if kind == "sign" and text.endswith("}") and len(text) > 1:
            if not depth:
                return tokens, position
            position = match.start(kind) + 1  # it closes a dictionary: only its first sign
            text = text[0]
        depth += (text == "{") - (text == "}")
        tokens.append(_Token(kind, text))
    return tokens, -1


def _targets(block: Sequence[_Token]) -> tuple[set[str], int]:
    """Names that a statement gives a value, and where the value begins."""
    index = 1 if block and block[0].is_sign("-", "+") else 0
    head = block[index] if index < len(block) else _END
    ends = {"set": ("=",), "for": ("in",), "macro": (")",)}.get(head.text) if head.kind == "name" else None
    names: set[str] = set()
    if ends is None:
        return names, 0
    for place in range(index + 1, len(block)):
        token, before = block[place], block[place - 1]
        if token.text in ends and token.kind != "text":
            return names, place + 1
        if token.kind == "name" and not before.is_sign("."):
            names.add(token.text)
    return names, len(block)


def _reads(block: Sequence[_Token], names: set[str], start: int = 0) -> Iterator[int]:
    """Where one of the names stands as a variable that is read."""
    for index in range(start, len(block)):
        token = block[index]
        if token.kind != "name" or token.text not in names:
            continue
        before = block[index - 1] if index else _END
        after = block[index + 1] if index + 1 < len(block) else _END
        if not before.is_sign(".", "|") and not after.is_sign("="):
            yield index


def _is_read(name: str, blocks: Sequence[Sequence[_Token]]) -> bool:
    """It is read before the template itself gives it a value."""
    for block in blocks:
        targets, start = _targets(block)
        if next(_reads(block, {name}, start), None) is not None:
            return True
        if name in targets:
            return False
    return False


@dataclass(slots=True)
class _Search:
    """The search for the levels of one switch."""

    names: set[str]  # it and its copies
    lists: dict[str, list[str]] = field(default_factory=dict)  # lists of texts that have a name
    levels: dict[str, None] = field(default_factory=dict)  # in the order of the template

    def add(self, *texts: str) -> None:
        for text in texts:
            if _LEVEL.fullmatch(text) and len(self.levels) < MAX_LEVELS:
                self.levels[text] = None


def _levels(switch: str, blocks: Sequence[Sequence[_Token]]) -> tuple[str, ...]:
    search = _Search({switch})
    for block in blocks:
        targets, start = _targets(block)
        for index in _reads(block, search.names, start):
            if index > 1 and block[index - 1].is_sign("==", "!=") and block[index - 2].kind == "text":
                search.add(block[index - 2].text)
            end = _after(block, index, search)
            following = (*block[end : end + 3], _END, _END, _END)
            if following[0].is_sign("==", "!=") or following[0].is_name("or"):
                search.add(*_texts([following[1]]))
            elif following[0].is_name("in"):
                search.add(*_members(block, end + 1, search))
            elif following[0].is_name("not") and following[1].is_name("in"):
                search.add(*_members(block, end + 2, search))
            if (
                len(targets) == 1
                and index == start
                and (end == len(block) or following[0].is_name("or", "if"))
            ):
                search.names |= targets
        value = [token for token in block[start:] if not token.is_sign("-", "+")]
        if len(targets) == 1 and value:
            name = next(iter(targets))
            if name in search.names and len(value) == 1:
                search.add(*_texts(value))
            elif value[0].is_sign(*_BRACKETS):
                search.lists[name] = _members(value, 0, search)
    return tuple(search.levels)


def _after(block: Sequence[_Token], index: int, search: _Search) -> int:
    """Where the filters and methods of the variable there end; a default among them is a level."""
    index += 1
    for _ in range(MAX_FILTERS):
        if index + 1 >= len(block) or not block[index].is_sign("|", ".") or block[index + 1].kind != "name":
            break
        name = block[index + 1].text
        index += 2
        if index < len(block) and block[index].is_sign("("):
            limit = min(len(block), index + MAX_LIST_TOKENS)
            closing = next((at for at in range(index, limit) if block[at].is_sign(")")), limit - 1)
            if name in ("default", "d"):
                search.add(*_texts(block[index + 1 : index + 2]))
            index = closing + 1
    return index


def _members(block: Sequence[_Token], index: int, search: _Search) -> list[str]:
    """The texts of a list, a tuple or the keys of a dictionary there, or of the list of that name."""
    if index >= len(block):
        return []
    first = block[index]
    if first.kind == "name":
        return search.lists.get(first.text, [])
    closing = _BRACKETS.get(first.text) if first.kind == "sign" else None
    found: list[str] = []
    for place in range(index + 1, min(len(block), index + MAX_LIST_TOKENS) if closing else 0):
        if block[place].is_sign(str(closing)):
            break
        follows = block[place + 1] if place + 1 < len(block) else _END
        if first.text != "{" or follows.is_sign(":"):
            found += _texts([block[place]])
    return found


def _texts(tokens: Sequence[_Token]) -> list[str]:
    return [token.text for token in tokens if token.kind == "text"]


def _looked_for(block: Sequence[_Token]) -> Iterator[str]:
    """Soft switches that are looked for in something, not written."""
    for index, token in enumerate(block):
        if token.kind != "text" or token.text.strip() not in SOFT_SWITCHES:
            continue
        before, after = (
            (_END, _END, *block[max(0, index - 2) : index]),
            (*block[index + 1 : index + 3], _END, _END),
        )
        searched = before[-1].is_sign("(") and before[-2].kind == "name" and before[-2].text in _SEARCHES
        compared = before[-1].is_sign("==", "!=") or after[0].is_sign("==", "!=")
        contained = after[0].is_name("in") or (after[0].is_name("not") and after[1].is_name("in"))
        if searched or compared or contained:
            yield token.text.strip()
