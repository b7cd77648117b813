"""The contract as a page of the manual: ``python3 -m lllm3090d.bus.service_page`` for docs/reference/dbus.md."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from lllm3090d.bus.service_contract import Argument, Interface, contract

_TOLD = {
    "true": "announced",
    "invalidates": "announced without its value",
    "const": "never changes",
    "false": "not announced",
}


def reference() -> str:
    """All interfaces with their members, as Markdown."""
    return "\n".join(line for interface in contract().values() for line in _interface(interface))


def _interface(interface: Interface) -> Iterator[str]:
    yield f"## `{interface.name}`\n"
    yield f"{interface.doc}\n"
    if interface.methods:
        yield "| Method | Takes | Gives | |"
        yield "|---|---|---|---|"
        for method in interface.methods.values():
            yield f"| `{method.name}` | {_list(method.takes)} | {_list(method.gives)} | {method.doc} |"
        yield ""
    if interface.properties:
        yield "| Property | Type | Change | |"
        yield "|---|---|---|---|"
        for each in interface.properties.values():
            yield f"| `{each.name}` | `{each.signature}` | {_TOLD[each.emits]} | {each.doc} |"
        yield ""
    if interface.signals:
        yield "| Signal | Carries | |"
        yield "|---|---|---|"
        for signal in interface.signals.values():
            yield f"| `{signal.name}` | {_list(signal.carries)} | {signal.doc} |"
        yield ""


def _list(arguments: Iterable[Argument]) -> str:
    return ", ".join(f"{each.name} `{each.signature}`" for each in arguments)


if __name__ == "__main__":
    sys.stdout.write(reference())
