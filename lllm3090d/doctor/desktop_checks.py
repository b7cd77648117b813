"""What the desktop offers."""

from __future__ import annotations

from lllm3090d.doctor.findings import Check, Finding, ok
from lllm3090d.doctor.surroundings import Facts, UnansweredError, World

NAME = "org.freedesktop.Notifications"
BUS = ("org.freedesktop.DBus", "/org/freedesktop/DBus", "org.freedesktop.DBus")


def notifications(world: World, facts: Facts) -> Finding:
    """Who shows notifications; that nobody does is no fault of a machine without a screen."""
    if not facts.settings.notice_topics:
        return ok(Check.NOTIFICATIONS, "Notifications are switched off (setting notifications).")
    try:
        owned = world.ask("busctl", "--user", "call", *BUS, "NameHasOwner", "s", NAME)
        startable = world.ask("busctl", "--user", "call", *BUS, "ListActivatableNames")
    except UnansweredError as error:
        return ok(Check.NOTIFICATIONS, f"Whether notifications are shown cannot be told: {error}.")
    if owned.status != 0:
        return ok(Check.NOTIFICATIONS, "No session bus answers here, so no notifications are shown.")
    if owned.stdout.strip() == "b true":
        return ok(Check.NOTIFICATIONS, "A notification service runs.")
    if f'"{NAME}"' in startable.stdout:
        return ok(Check.NOTIFICATIONS, "D-Bus starts a notification service with the first notification.")
    return ok(
        Check.NOTIFICATIONS, "There is no notification service: what happens is told by lllm3090ctl events."
    )
