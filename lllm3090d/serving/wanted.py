"""The wanted set: models that are to run, and what becomes of each at the daemon's start. Pure.

Wanted is what a person has loaded, or what is marked ``autoload``, until a person wants it gone or it is gone for good.
The set is derived from what runs, after every event, and written down before the deed that follows from the event: so a
daemon that is killed between an eviction and its load, or between the stop and the start of a model, leaves the wish.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.planning.request import PlanRequest
from lllm3090d.serving.instance import ENDED, ON_THE_WAY_UP, SERVING, InstanceState
from lllm3090d.serving.plan_requests import LoadWish
from lllm3090d.serving.restarts import End
from lllm3090d.serving.running import Evicted, Instance
from lllm3090d.serving.sleep_set import asked_for
from lllm3090d.serving.unit_spec import MOST_NAME_CHARACTERS, Record

S = InstanceState
MOST_ATTEMPTS = 1_000_000
# Of a problem's details: what an error is made with by itself.
OWN_WORDS = frozenset({"self", "code", "message", "hint"})


class Lot(enum.StrEnum):
    """How it stands with a wanted model."""

    UP = "up"  # its unit runs, and nobody of ours has asked it to stop
    COMING = "coming"  # it does not run, and is to be loaded
    EVICTED = "evicted"  # it went for a load that has not come to its end
    RELEASED = "released"  # the cards were given away until somebody resumes
    DIED = "died"  # it ended by itself a moment ago, and nobody knows yet why
    FAILED = "failed"  # it ended by itself, and is to be started again
    LATCHED = "latched"  # it ended by itself, and stays down until a person resets it


class Want(BaseModel):
    """A wanted model, and what it takes to load it as it was.

    Attributes:
        name: of the model.
        lot: how it stands with it.
        run: its last launch; empty before the first.
        request: what its load asked for.
        arguments: further ones of a person, word by word.
        card: the only card that it was to be on; None left the choice.
        least_context_tokens: what it had, where that was less than it asked for.
        pinned: never to be evicted.
        evicted_for: the launch that it went for, with the lot EVICTED.
        record: of its last launch; what failed is shown by it.
        ends: ends by itself since the last reset, oldest first.
        retry_at_s: when a failed one is started again, on the monotonic clock, which counts from the boot.
        next_attempt: as which attempt.
        latch_reason, way_out: why a latched one stays down, and what a person can do.
        problem: why it failed, as a problem document.
    """

    model_config = ConfigDict(frozen=True)
    name: str = Field(min_length=1, max_length=MOST_NAME_CHARACTERS)
    lot: Lot
    run: str = ""
    request: PlanRequest = PlanRequest()
    arguments: tuple[str, ...] = ()
    card: str | None = None
    least_context_tokens: int | None = Field(default=None, ge=1)
    pinned: bool = False
    evicted_for: str | None = None
    record: Record | None = None
    ends: tuple[End, ...] = ()
    retry_at_s: float | None = None
    next_attempt: int = Field(default=0, ge=0, le=MOST_ATTEMPTS)
    latch_reason: str = ""
    way_out: str = ""
    problem: dict[str, Any] | None = None

    def evicted(self) -> Evicted:
        """As one that is loaded again should what it went for not come up."""
        return Evicted(self.name, self.request, self.arguments, self.pinned, self.card)

    def wish(self) -> LoadWish:
        """How it is loaded again: like any other, but nothing is unloaded for it."""
        return LoadWish(
            request=self.request,
            arguments=self.arguments,
            card=self.card,
            least_context_tokens=self.least_context_tokens,
            pinned=self.pinned,
            may_evict=False,
        )


@dataclass(frozen=True, slots=True)
class Life:
    """Of the daemon: which boot and which user manager it lived under.

    Attributes:
        boot: tells one boot from another; empty where nobody could tell.
        session: tells one user manager of a boot from another; empty where nobody could tell.
        ended: it ended in order, and was not killed.
    """

    boot: str
    session: str
    ended: bool = False


class Occasion(enum.StrEnum):
    """What the daemon's start is, seen from its last life."""

    CONTINUED = "continued"  # the same user manager: what ran goes on
    LOGIN = "login"  # another boot, or another user manager after an orderly end
    MANAGER_DIED = (
        "manager died"  # another user manager of the same boot, and nobody had asked the daemon to end
    )


def occasion(now: Life, before: Life | None, *, has_units: bool) -> Occasion:
    """What a start is.

    Args:
        now: the present life.
        before: the last one; None where none is known.
        has_units: models of ours run.
    """
    if before is None:
        return Occasion.CONTINUED if has_units else Occasion.LOGIN
    if before.boot != now.boot:
        return Occasion.LOGIN
    if before.session == now.session or has_units:
        return Occasion.CONTINUED
    return Occasion.LOGIN if before.ended else Occasion.MANAGER_DIED


@dataclass(frozen=True, slots=True)
class Scene:
    """What of the daemon the set follows from.

    Attributes:
        instances: of the scheduler.
        evicted: the launch that a model went for, by the model's name, while that has not come to its end.
        coming: models that are being asked for again.
        released: the cards are given away.
        ends: of models that ended by themselves, by name.
    """

    instances: tuple[Instance, ...] = ()
    evicted: Mapping[str, str] = field(default_factory=dict)
    coming: Collection[str] = frozenset()
    released: bool = False
    ends: Mapping[str, tuple[End, ...]] = field(default_factory=dict)


def followed(before: Mapping[str, Want], scene: Scene) -> dict[str, Want]:
    """The set after something has happened: in the order in which its members came to be wanted."""
    present = {each.name: each for each in scene.instances}
    after: dict[str, Want] = {}
    for name in (*before, *(each for each in present if each not in before)):
        want, instance = before.get(name), present.get(name)
        now = _absent(want, scene) if instance is None else _present(want, instance, scene)
        if now is not None:
            after[name] = now
    return after


def _absent(want: Want | None, scene: Scene) -> Want | None:
    """Of one that nothing is there of."""
    if want is None:
        return None
    if want.name in scene.evicted:
        return _with(want, Lot.EVICTED, evicted_for=scene.evicted[want.name])
    if want.name in scene.coming:
        return _with(want, Lot.COMING)
    match want.lot:
        case Lot.COMING | Lot.RELEASED:
            return want
        case Lot.EVICTED:  # what it went for is there, and it is gone for good; unless everything went
            return _with(want, Lot.RELEASED) if scene.released else None
    return None


def _present(want: Want | None, instance: Instance, scene: Scene) -> Want | None:
    state = instance.state
    if want is None and not instance.is_known:
        return None  # nobody here has loaded it
    if state in SERVING or state is S.LOADING:
        return _of(want, instance, Lot.UP, scene)
    if state in ON_THE_WAY_UP:
        return _of(want, instance, Lot.COMING, scene)
    if state in ENDED:
        return _ended(want, instance, scene)
    if want is None or instance.unwanted:
        return None
    return _with(want, Lot.DIED) if instance.ended_by_itself else _going(want, scene)


def _going(want: Want, scene: Scene) -> Want | None:
    """Of one that is on its way down, and nobody wants it gone."""
    name = want.name
    if name in scene.evicted:
        return _with(want, Lot.EVICTED, evicted_for=scene.evicted[name])
    if scene.released:
        return _with(want, Lot.RELEASED)
    if want.lot is Lot.EVICTED and name not in scene.coming:
        return None
    return _with(want, Lot.COMING)


def _ended(want: Want | None, instance: Instance, scene: Scene) -> Want | None:
    """Of one that has ended by itself."""
    if instance.state is S.LATCHED:
        return _of(want, instance, Lot.LATCHED, scene)
    if instance.next_attempt:  # due at some time, or its start is being asked for
        return _of(want, instance, Lot.FAILED, scene)
    # It is told as failed; whoever asked for it knows.
    return want if want is not None and instance.name in scene.coming else None


def _with(want: Want, lot: Lot, evicted_for: str | None = None) -> Want:
    """The same in another lot; the very same where nothing changes."""
    if want.lot is lot and want.evicted_for == evicted_for:
        return want
    return want.model_copy(update={"lot": lot, "evicted_for": evicted_for})


def _of(want: Want | None, instance: Instance, lot: Lot, scene: Scene) -> Want:
    """What an instance says; the very same where nothing of it has changed."""
    failure = instance.failure if lot in {Lot.FAILED, Lot.LATCHED} else None
    ends = scene.ends.get(instance.name, ())
    # While a failed one is being started again the reason is kept: it may be all that the next daemon finds.
    earlier = want.problem if want is not None and ends and lot is Lot.COMING else None
    now: dict[str, Any] = {
        "lot": lot,
        "run": instance.run,
        "pinned": instance.pinned,
        "evicted_for": None,
        "ends": ends,
        "retry_at_s": instance.retry_at_s,
        "next_attempt": instance.next_attempt,
        "latch_reason": instance.latch_reason,
        "way_out": instance.way_out,
        "problem": failure.problem() if failure is not None else earlier,
    }
    if want is not None and want.run == instance.run:
        if all(getattr(want, key) == value for key, value in now.items()):
            return want
        return want.model_copy(update=now)
    request, plan = asked_for(instance), instance.plan
    is_smaller = request.context_tokens is not None and plan.context_tokens < request.context_tokens
    return Want(
        name=instance.name,
        request=request,
        arguments=instance.words,
        card=instance.card,
        least_context_tokens=plan.context_tokens if is_smaller else None,
        record=instance.record,
        **now,
    )


@dataclass(frozen=True, slots=True)
class Beginning:
    """What becomes of the set at a start.

    Attributes:
        kept: the set, in order.
        load: those to be loaded now, in order.
        failed: those whose failure is to be remembered.
        owed: what went for a launch that is still on its way up, by its run.
        ended: launches that were found dead and had been asked to end, and whether each is to be loaded again.
        lost: models that somebody stopped while no daemon was there.
    """

    kept: Mapping[str, Want]
    load: tuple[Want, ...] = ()
    failed: tuple[Want, ...] = ()
    owed: Mapping[str, tuple[Want, ...]] = field(default_factory=dict)
    ended: Mapping[str, bool] = field(default_factory=dict)
    lost: tuple[str, ...] = ()


def beginning(
    before: Iterable[Want],
    scene: Scene,
    what: Occasion,
    *,
    asleep: Collection[str] = frozenset(),
    is_known: bool = True,
) -> Beginning:
    """Decide what becomes of the set after units were adopted; a login begins with an empty one.

    Args:
        before: as the daemon's last life has left it, in order.
        scene: what was adopted.
        what: the occasion.
        asleep: models that were unloaded for a sleep: they are loaded again for that, or not at all.
        is_known: what was wanted is known, so that what is not among it was not.
    """
    wants = [] if what is Occasion.LOGIN else [each for each in before if each.name not in asleep]
    present = {each.name: each for each in scene.instances}
    by_name = {each.name: each for each in wants}
    ended = {
        each.run: by_name.get(each.name) is not None
        for each in (scene.instances if is_known else ())
        if each.post_mortem_pending and _was_asked(by_name.get(each.name), each)
    }
    runs = {each.run: each for each in scene.instances}
    kept: dict[str, Want] = {}
    load: list[Want] = []
    failed: list[Want] = []
    owed: dict[str, tuple[Want, ...]] = {}
    lost: list[str] = []
    for want in wants:
        instance = present.get(want.name)
        if (
            instance is not None
            and instance.state not in {S.STOPPING, S.STUCK}
            and instance.run not in ended
        ):
            kept[want.name] = want  # what runs, or has just failed, tells by itself what becomes of it
            failed += [want] if want.ends else []
        elif want.lot in {Lot.FAILED, Lot.LATCHED} and instance is None:
            if want.record is not None:
                is_asked_for = want.lot is Lot.FAILED and want.retry_at_s is None
                kept[want.name] = _due(want) if is_asked_for else want
                failed.append(kept[want.name])
        elif (
            want.lot in {Lot.COMING, Lot.DIED} and want.ends and want.record is not None and instance is None
        ):
            kept[want.name] = _due(want)  # between the end of one launch and the start of the next
            failed.append(kept[want.name])
        elif want.lot is Lot.EVICTED and (evictor := runs.get(want.evicted_for or "")) is not None:
            if evictor.state in ON_THE_WAY_UP:
                kept[want.name] = want
                owed[evictor.run] = (*owed.get(evictor.run, ()), want)
            elif evictor.state not in SERVING:
                load.append(want)
        elif want.lot is Lot.UP and (what is Occasion.CONTINUED or instance is not None):
            lost.append(want.name)  # we had not asked for its end
        else:
            load.append(want)
    lot = Lot.RELEASED if scene.released else Lot.COMING
    kept |= {each.name: _with(each, lot) for each in load}
    ordered = {each.name: kept[each.name] for each in wants if each.name in kept}
    due = () if scene.released else tuple(ordered[each.name] for each in load)
    return Beginning(ordered, due, tuple(failed), owed, ended, tuple(lost))


def _was_asked(want: Want | None, instance: Instance) -> bool:
    """Whether a unit that was found dead had been asked to end; one that no longer was wanted had.

    One that nobody here has loaded never was wanted: that says nothing of how it ended.
    """
    if want is None:
        return instance.is_known
    return want.run == instance.run and want.lot in {Lot.EVICTED, Lot.RELEASED, Lot.COMING}


def _due(want: Want) -> Want:
    """Of one that was being started again: as one whose start is due."""
    attempt = want.next_attempt or len(want.ends)
    return want.model_copy(update={"lot": Lot.FAILED, "retry_at_s": 0.0, "next_attempt": attempt})


def failure_of(want: Want) -> LlmError | None:
    """Why it failed, from its problem document; None where it has none, or one that cannot be understood."""
    told = want.problem or {}
    code, hint, details = told.get("code"), told.get("hint"), told.get("details")
    if not isinstance(code, str) or code not in set(ErrorCode):
        return None
    kept = details if isinstance(details, dict) else {}
    return LlmError(
        ErrorCode(code),
        str(told.get("detail", "")),
        hint=hint if isinstance(hint, str) else None,
        **{key: value for key, value in kept.items() if key not in OWN_WORDS},
    )
