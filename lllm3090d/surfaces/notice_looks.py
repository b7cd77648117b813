"""How a notice looks on a given service: no more than it can show, and nothing in a name that it would obey. Pure."""

from __future__ import annotations

from collections.abc import Collection
from html import escape

from lllm3090d.bus.notifications import Message
from lllm3090d.settings import NoticeTopic
from lllm3090d.surfaces.notices import Notice

LONGEST_SUMMARY = 100  # characters
LONGEST_BODY = 700
STRANGE = "\N{REPLACEMENT CHARACTER}"
_ICONS = {
    NoticeTopic.REFUSED: "dialog-warning",
    NoticeTopic.FAILED: "dialog-error",
    NoticeTopic.LATCHED: "dialog-error",
    NoticeTopic.PRESSURE: "dialog-information",
    NoticeTopic.RESTORED: "dialog-warning",
}


def looks(notice: Notice, capabilities: Collection[str]) -> Message:
    """A notice as a service with these capabilities shows it.

    Without buttons the commands that do the same are told, without a body its beginning stands in the summary. Nothing
    is critical: that would break through "do not disturb", and a model is not worth it.
    """
    has_buttons = "actions" in capabilities
    body = notice.body
    commands = [each.command for each in notice.buttons if each.command]
    if not has_buttons and commands:
        body = f"{body}\n" + "\n".join(commands)
    summary = notice.summary
    if "body" not in capabilities:
        summary, body = f"{summary}: {body}", ""
    body = _plain(body, LONGEST_BODY)
    return Message(
        summary=_plain(summary, LONGEST_SUMMARY if body else LONGEST_SUMMARY * 2),
        body=escape(body, quote=False) if "body-markup" in capabilities else body,
        actions={str(each.act): each.label for each in notice.buttons} if has_buttons else {},
        icon="dialog-information" if notice.is_good else _ICONS[notice.topic],
        category=f"x-lllm3090.{notice.topic}",
        urgency=0 if notice.is_good else 1,
        expires_ms=0 if notice.lasting else -1,
        is_transient=notice.is_good and "persistence" in capabilities,
    )


def _plain(text: str, longest: int) -> str:
    """Text that cannot steer what shows it: no control characters, no change of direction; cut where it is long."""
    shown = "".join(each if each.isprintable() or each == "\n" else STRANGE for each in text)
    return shown if len(shown) <= longest else shown[: longest - 1] + "\N{HORIZONTAL ELLIPSIS}"
