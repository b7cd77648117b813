"""Who could give memory back for a launch that does not fit, and how much more could be granted then. Pure.

What would become free is worked out from both sides of the budget (:mod:`lllm3090d.planning.reserves`). A program that
is covered by the desktop reserve anyway gives nothing when it is closed.
"""

from __future__ import annotations

import enum
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from lllm3090d.gpus.readings import CardKind
from lllm3090d.planning.reserves import Budget
from lllm3090d.planning.units import mib_text
from lllm3090d.serving.commands import unloading
from lllm3090d.serving.ledger import Reservation, ReservationState
from lllm3090d.serving.observation import Stranger, is_foreign_unit

GIB = 1 << 30
SECONDS_OF_MINUTES = 120  # from here on an age is told in minutes
MINUTES_OF_HOURS = 120
# Programs that are the desktop itself: who closes one ends the session.
DESKTOP_PROGRAMS = frozenset(
    {
        "Xorg",
        "Xwayland",
        "cinnamon",
        "cosmic-comp",
        "gnome-shell",
        "kwin_wayland",
        "kwin_x11",
        "labwc",
        "mutter",
        "niri",
        "plasmashell",
        "river",
        "sway",
        "wayfire",
        "weston",
        "xfwm4",
        "Hyprland",
    }
)
END_DESKTOP = "systemctl isolate multi-user.target"


class RemedyKind(enum.StrEnum):
    """Ways to make it fit, the cheapest for a person first; clients must treat an unknown one by its text."""

    HEADLESS = "headless"  # plan without the desktop that was only thought of
    WAIT = "wait"  # one of our models is being unloaded
    UNLOAD = "unload"  # idle ones
    CACHE_TYPE = "cache-type"
    CONTEXT = "context"
    SLOTS = "slots"
    CLOSE = "close"  # a program of the same user
    DRAFTING = "drafting"
    PROJECTOR = "projector"
    PROMPT_CACHE = "prompt-cache"
    UNLOAD_PINNED = "unload-pinned"
    OFFLOAD = "offload"
    QUARANTINE = "quarantine"  # memory that has not come back
    COMBINED = "combined"  # several of these together, as nothing suffices alone
    UNLOAD_BUSY = "unload-busy"  # busy or loading ones
    OTHERS = "others"  # another user's program, or one that nobody names
    END_DESKTOP = "end-desktop"
    LARGER_CARD = "larger-card"


EASE: Mapping[RemedyKind, int] = {kind: rank for rank, kind in enumerate(RemedyKind)}


@dataclass(frozen=True, slots=True)
class Holder:
    """One of our models that runs.

    Attributes:
        name: of the model.
        run: of the launch.
        idle_s: seconds without a request; None while it is busy or on its way.
        pinned: it is never evicted for another one.
        is_ending: it is being unloaded already.
    """

    name: str
    run: str
    idle_s: float | None
    pinned: bool
    is_ending: bool = False


@dataclass(frozen=True, slots=True)
class Scene:
    """One memory at the moment of a refusal.

    Attributes:
        kind: whose memory it is.
        budget: what it can give.
        reservations: of our models in it.
        holders: our models that run, by run.
        strangers: who else holds memory.
        held: bytes each run holds by the reading, by run; see :func:`lllm3090d.serving.admission.held_now`.
        resident: bytes each run has taken of what it was promised, by run.
        now_s: on the scheduler's clock; None where ages are unknown.
        host: what host memory beside the card can give; None where nobody limits it.
    """

    kind: CardKind
    budget: Budget
    reservations: tuple[Reservation, ...] = ()
    holders: Mapping[str, Holder] = field(default_factory=dict)
    strangers: tuple[Stranger, ...] = ()
    held: Mapping[str, int] = field(default_factory=dict)
    resident: Mapping[str, int] = field(default_factory=dict)
    now_s: float | None = None
    host: Budget | None = None


@dataclass(frozen=True, slots=True)
class Freeing:
    """Somebody who could give memory back.

    Attributes:
        kind: how.
        phrase: the same for a person, as a command to them.
        command: what carries it out; empty where a person has to.
        charged_bytes: what the promises would no longer count.
        held_bytes: what the reading would show free.
        to_come_bytes: what was still on its way.
        foreign_bytes: what others would no longer hold.
        is_desktop: nothing is kept for a desktop any more.
        is_unit: a foreign unit gives it back, which is charged like a model.
    """

    kind: RemedyKind
    phrase: str
    command: str = ""
    charged_bytes: int = 0
    held_bytes: int = 0
    to_come_bytes: int = 0
    foreign_bytes: int = 0
    is_desktop: bool = False
    is_unit: bool = False

    @property
    def is_ours(self) -> bool:
        """One of our models gives it back."""
        return bool(self.charged_bytes) and not self.is_unit

    @property
    def ease(self) -> int:
        """Its rank; less is easier."""
        return EASE[self.kind]


def gain_bytes(budget: Budget, freed: Iterable[Freeing]) -> int:
    """How much more could be granted, by both sides of the budget; 0 where it is not more.

    On each side the greater of desktop reserve and foreign memory counts, so what a program gives back is only the
    part above that reserve.
    """
    gone = tuple(freed)
    desktop = 0 if any(each.is_desktop for each in gone) else budget.desktop_bytes
    before = budget.foreign_bytes
    foreign = max(0, before - sum(each.foreign_bytes for each in gone))
    kept_before = max(0, budget.desktop_bytes - before)
    promised = budget.available_bytes + sum(each.charged_bytes for each in gone)
    promised += max(budget.desktop_bytes, before) - max(desktop, foreign)
    live = budget.live_bytes + sum(each.held_bytes + each.to_come_bytes for each in gone)
    live += before - foreign + kept_before - max(0, desktop - foreign)
    return max(0, min(promised, live) - budget.grantable_bytes)


def all_freeings(scene: Scene) -> tuple[Freeing, ...]:
    """Everybody who could give memory back, the easiest first."""
    found = [*(_of_ours(scene, each) for each in scene.reservations), *_of_strangers(scene)]
    found += _of_units(scene)
    return tuple(sorted(found, key=lambda each: (each.ease, each.charged_bytes + each.foreign_bytes)))


def duration_text(seconds: float) -> str:
    """An age for a person: seconds, minutes or hours, rounded down."""
    whole = int(seconds)
    if whole < SECONDS_OF_MINUTES:
        return f"{whole} s"
    minutes = whole // 60
    if minutes < MINUTES_OF_HOURS:
        return f"{minutes} min"
    return f"{minutes // 60} h"


def size_text(size_bytes: int) -> str:
    """What somebody holds, for a person: GiB from one GiB on, to the nearest tenth; else MiB."""
    return f"{size_bytes / GIB:,.1f} GiB" if size_bytes >= GIB else f"{mib_text(size_bytes)} MiB"


def who(stranger: Stranger) -> str:
    """A foreign process for a person."""
    if stranger.unseen:
        return f"a process of an unknown owner (pid {stranger.pid})"
    name = f"the model {stranger.model}" if stranger.model else stranger.name or "a process"
    owner = f" of {stranger.user}" if stranger.user else ""
    return f"{name}{owner} (pid {stranger.pid})"


def state_text(scene: Scene, reservation: Reservation) -> str:
    """What one of our models does, for a person; empty where nobody knows."""
    age = "" if scene.now_s is None else f" for {duration_text(max(0.0, scene.now_s - reservation.since_s))}"
    if reservation.state is ReservationState.QUARANTINED:
        return f"not given back{age}"
    if _is_ending(scene, reservation):
        return "being unloaded"
    if reservation.state is ReservationState.HELD:
        return "loading"
    holder = scene.holders.get(reservation.run)
    if holder is None:
        return ""
    doing = "busy" if holder.idle_s is None else f"idle {duration_text(holder.idle_s)}"
    return f"pinned, {doing}" if holder.pinned else doing


def _is_ending(scene: Scene, reservation: Reservation) -> bool:
    holder = scene.holders.get(reservation.run)
    return reservation.state is ReservationState.RELEASING or (holder is not None and holder.is_ending)


def _of_ours(scene: Scene, reservation: Reservation) -> Freeing:
    """What one of our models could give back."""
    name, size = reservation.name, size_text(reservation.charged_bytes)
    state, holder = reservation.state, scene.holders.get(reservation.run)
    about = state_text(scene, reservation)
    phrase, command = f"unload {name} ({', '.join(filter(None, (size, about)))})", unloading((name,))
    kind = RemedyKind.UNLOAD
    if state is ReservationState.QUARANTINED:
        kind, command = RemedyKind.QUARANTINE, ""
        phrase = f"wait for the {size} of {name} that have {about.replace('given back', 'come back')}"
    elif _is_ending(scene, reservation):
        kind, command = RemedyKind.WAIT, ""
        phrase = f"wait until {name} is unloaded ({size})"
    elif state is ReservationState.HELD or (holder is not None and holder.idle_s is None):
        kind = RemedyKind.UNLOAD_BUSY
    elif holder is not None and holder.pinned:
        kind = RemedyKind.UNLOAD_PINNED
    to_come = 0
    if state is ReservationState.HELD:
        to_come = max(0, reservation.reserved_bytes - scene.resident.get(reservation.run, 0))
    return Freeing(
        kind,
        phrase,
        command,
        charged_bytes=reservation.charged_bytes,
        held_bytes=scene.held.get(reservation.run, 0),
        to_come_bytes=to_come,
    )


def foreign_units(scene: Scene) -> dict[str, int]:
    """What units that are left alone hold of the memory, by name, the largest first."""
    found = {name: size for name, size in scene.held.items() if is_foreign_unit(name) and size}
    return dict(sorted(found.items(), key=lambda each: -each[1]))


def _of_units(scene: Scene) -> list[Freeing]:
    """What units that are left alone could give back, which a person may stop."""
    return [
        Freeing(
            RemedyKind.CLOSE,
            f"stop the foreign unit {name} ({size_text(size)})",
            f"systemctl --user stop {shlex.quote(name)}",
            charged_bytes=size,
            held_bytes=size,
            is_unit=True,
        )
        for name, size in foreign_units(scene).items()
    ]


def _of_strangers(scene: Scene) -> list[Freeing]:
    """What others could give back; where host memory is the card, that is the machine itself, so nothing is offered."""
    if scene.kind is CardKind.CPU:
        return []
    found = []
    desktop_bytes = 0
    sessions: dict[str, int] = {}  # of other people who are logged in too
    for each in scene.strangers:
        if not each.used_bytes:
            continue
        if each.name in DESKTOP_PROGRAMS and each.is_persons:
            sessions[each.user] = sessions.get(each.user, 0) + each.used_bytes
        elif each.name in DESKTOP_PROGRAMS:  # X servers are often root's, greeters a user's of their own
            desktop_bytes += each.used_bytes
        elif each.user or each.unseen:
            found.append(Freeing(RemedyKind.OTHERS, _asking(each), foreign_bytes=each.used_bytes))
        else:
            phrase = f"close {each.name or 'the process'} ({size_text(each.used_bytes)}, pid {each.pid})"
            command = f"kill {each.pid}"
            found.append(Freeing(RemedyKind.CLOSE, phrase, command, foreign_bytes=each.used_bytes))
    found += [
        Freeing(RemedyKind.OTHERS, f"ask {user} to log out ({size_text(size)})", foreign_bytes=size)
        for user, size in sessions.items()
    ]
    unlisted = unlisted_bytes(scene)
    if unlisted:
        found.append(_finding(scene, unlisted))
    if scene.budget.desktop_bytes or desktop_bytes:
        size = size_text(max(scene.budget.desktop_bytes, desktop_bytes))
        phrase = f"end the desktop session ({size})"
        found.append(
            Freeing(
                RemedyKind.END_DESKTOP, phrase, END_DESKTOP, foreign_bytes=desktop_bytes, is_desktop=True
            )
        )
    return found


def _asking(stranger: Stranger) -> str:
    """What to do about a process that is not one's own to end."""
    size = size_text(stranger.used_bytes or 0)
    if stranger.unseen:
        return f"find out who owns process {stranger.pid}, which holds {size} ({stranger.unseen})"
    if stranger.model:
        return f"ask {stranger.user} to unload the model {stranger.model} ({size}, pid {stranger.pid})"
    return f"ask {stranger.user} to close {stranger.name or 'it'} ({size}, pid {stranger.pid})"


def _finding(scene: Scene, size_bytes: int) -> Freeing:
    """Memory that no program is listed with; other users' models are named, which may hold it."""
    size = size_text(size_bytes)
    phrase = f"find out what holds {size} that the driver names no program for"
    command = "nvidia-smi" if scene.kind is CardKind.NVIDIA else ""
    models = [each for each in scene.strangers if each.model and each.used_bytes is None]
    if models:
        asked = " and ".join(f"{each.user} about the model {each.model} (pid {each.pid})" for each in models)
        phrase, command = f"ask {asked}: the driver does not tell who holds {size}", ""
    return Freeing(RemedyKind.OTHERS, phrase, command, foreign_bytes=size_bytes)


def unlisted_bytes(scene: Scene) -> int:
    """Foreign memory that no listed process accounts for."""
    return max(0, scene.budget.foreign_bytes - sum(each.used_bytes or 0 for each in scene.strangers))
