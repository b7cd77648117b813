"""What a card can give: driver, desktop, foreign memory and our own reservations, line by line. Pure.

Admission is one inequality with two sides, and a launch must satisfy both. The first counts promises: what
would be left if everybody took all that is theirs. The second counts what is free now, less what is already
on its way.

    available = total - driver - max(desktop reserve, foreign now) - ours - quarantined
    live      = free - still to come of loading engines - max(0, desktop reserve - foreign now)

Where host memory takes the card's place there is neither driver nor desktop; the machine keeps max(2 GiB, 10
%) on both sides.
"""

from __future__ import annotations

from dataclasses import dataclass

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind, MemoryReading
from lllm3090d.planning.units import MIB

# Judgement: what the kernel, the daemon and a person's shell need so that the machine stays usable.
HOST_RESERVE_LEAST_BYTES = 2048 * MIB
HOST_RESERVE_PERCENT = 10
_CHECKS = {
    CardKind.NVIDIA: "check the driver with nvidia-smi.",
    CardKind.CPU: "check /proc/meminfo.",
}


@dataclass(frozen=True, slots=True)
class ReservePolicy:
    """What the settings decide about reserves.

    Attributes:
        driver_reserve_mib: MiB the driver keeps, used only where the card does not tell.
        desktop_reserve_mib: MiB kept for the compositor and browser of an active desktop.
    """

    driver_reserve_mib: int
    desktop_reserve_mib: int


@dataclass(frozen=True, slots=True)
class Claims:
    """What our own models hold and were promised, bytes.

    Attributes:
        charged_bytes: sum over our models of max(reserved, measured), without quarantine.
        still_to_come_bytes: promised to loading engines and not taken yet.
        held_bytes: what our processes hold in the reading.
        quarantined_bytes: of engines that ended without the card showing their memory back.
        returning_bytes: what the reading counts as used and would be free, were those gone whom the other claims
            leave out: the planned victims of an eviction.
        foreign_unit_bytes: held by units that are left alone; a part of what is held.
    """

    charged_bytes: int = 0
    still_to_come_bytes: int = 0
    held_bytes: int = 0
    quarantined_bytes: int = 0
    returning_bytes: int = 0
    foreign_unit_bytes: int = 0

    def __post_init__(self) -> None:
        """A negative claim would grant memory that is not there."""
        if (
            min(
                self.charged_bytes,
                self.still_to_come_bytes,
                self.held_bytes,
                self.quarantined_bytes,
                self.returning_bytes,
                self.foreign_unit_bytes,
            )
            < 0
        ):
            raise ValueError(f"claims cannot be negative: {self}")


@dataclass(frozen=True, slots=True)
class BudgetLine:
    """One term of a budget.

    Attributes:
        name: short and stable.
        bytes: signed; deductions are negative.
        origin: reading, constant or owner behind it.
    """

    name: str
    bytes: int
    origin: str


@dataclass(frozen=True, slots=True)
class Budget:
    """What the card can give, by promises and by what is free now.

    Attributes:
        lines: terms of the promises; they add up to ``available_bytes``.
        live_lines: terms of what is free now; they add up to ``live_bytes``.
        desktop_bytes: what is kept for a desktop, whether or not it decides; 0 without one.
        foreign_bytes: what others hold now, whether or not it decides.
    """

    lines: tuple[BudgetLine, ...]
    live_lines: tuple[BudgetLine, ...]
    desktop_bytes: int = 0
    foreign_bytes: int = 0

    @property
    def available_bytes(self) -> int:
        """Left when all promises are kept; negative where more is promised or taken than there is."""
        return sum(line.bytes for line in self.lines)

    @property
    def live_bytes(self) -> int:
        """Left now, when what is under way has arrived; may be negative."""
        return sum(line.bytes for line in self.live_lines)

    @property
    def grantable_bytes(self) -> int:
        """What a new launch may cost: the smaller of both, never negative."""
        return max(0, min(self.available_bytes, self.live_bytes))

    @property
    def deciding_lines(self) -> tuple[BudgetLine, ...]:
        """The terms of the smaller side, the one that explains ``grantable_bytes``."""
        return self.lines if self.available_bytes <= self.live_bytes else self.live_lines


def host_reserve_bytes(total_bytes: int) -> int:
    """What the machine keeps where host memory takes the card's place: max(2 GiB, 10 %)."""
    return max(HOST_RESERVE_LEAST_BYTES, total_bytes * HOST_RESERVE_PERCENT // 100)


def host_budget(total_bytes: int, available_bytes: int, untaken_bytes: int) -> Budget:
    """Work out what host memory can give beside a card.

    It is taken slowly (prompts that are kept, checkpoints of contexts), so what was promised and not taken yet is
    counted for as long as a model runs; what is taken shows in what is available.

    Args:
        total_bytes: ``MemTotal``.
        available_bytes: ``MemAvailable`` now.
        untaken_bytes: promised to our models and not taken yet.
    """
    reserve = host_reserve_bytes(total_bytes)
    lines = (
        BudgetLine("available", available_bytes, "reading"),
        BudgetLine("own reserve", -reserve, f"max(2 GiB, {HOST_RESERVE_PERCENT} %) for the machine itself"),
        *_line("our models", -untaken_bytes, "promised and not taken yet"),
    )
    return Budget(lines=lines, live_lines=lines)


def budget(
    card: Card, reading: MemoryReading, claims: Claims, desktop_active: bool | None, policy: ReservePolicy
) -> Budget:
    """Work out what a card can give.

    Args:
        card: the card, or host memory in its place.
        reading: its memory now.
        claims: what our own models hold and were promised.
        desktop_active: a desktop session is on the card; None (unknown) counts as active.
        policy: reserves from the settings.

    Raises:
        LlmError: CARD_UNREADABLE for a reading that cannot be true.
    """
    _check(card, reading)
    # A process can be seen a moment earlier or by a coarser measure than the card: never less than nothing.
    # Where the driver does not tell what it keeps for itself, that is in what is used: it is deducted once.
    tells = reading.reserved_bytes is not None or card.kind is CardKind.CPU
    untold = 0 if tells else policy.driver_reserve_mib * MIB
    foreign = max(0, reading.used_bytes - claims.held_bytes - untold)
    if card.kind is CardKind.CPU:
        reserve = host_reserve_bytes(reading.total_bytes)
        origin = f"max(2 GiB, {HOST_RESERVE_PERCENT} %) for the machine itself"
        own = (BudgetLine("own reserve", -reserve, origin),)
        others = _line("other processes", -foreign, "used now, without our models")
        return Budget(
            lines=(_total(reading), *own, *others, *_claimed(claims)),
            live_lines=(_free(reading), *own, *_under_way(claims), *_returning(claims)),
            foreign_bytes=foreign,
        )
    desktop = 0 if desktop_active is False else policy.desktop_reserve_mib * MIB
    return Budget(
        lines=(
            _total(reading),
            *_driver(reading, policy),
            *_foreign(foreign, desktop, desktop_active),
            *_claimed(claims),
        ),
        live_lines=(
            _free(reading),
            *_under_way(claims),
            *_returning(claims),
            *_line("desktop reserve", -max(0, desktop - foreign), "what the desktop may still take"),
        ),
        desktop_bytes=desktop,
        foreign_bytes=foreign,
    )


def _line(name: str, size_bytes: int, origin: str) -> tuple[BudgetLine, ...]:
    return (BudgetLine(name, size_bytes, origin),) if size_bytes else ()


def _total(reading: MemoryReading) -> BudgetLine:
    return BudgetLine("total", reading.total_bytes, "reading")


def _free(reading: MemoryReading) -> BudgetLine:
    return BudgetLine("free", reading.free_bytes, "reading")


def _driver(reading: MemoryReading, policy: ReservePolicy) -> tuple[BudgetLine, ...]:
    if reading.reserved_bytes is None:
        return _line(
            "driver", -policy.driver_reserve_mib * MIB, "setting driver_reserve_mib, the card does not tell"
        )
    return _line("driver", -reading.reserved_bytes, "reading")


def _foreign(foreign_bytes: int, desktop_bytes: int, desktop_active: bool | None) -> tuple[BudgetLine, ...]:
    if foreign_bytes >= desktop_bytes:
        return _line("other processes", -foreign_bytes, "used now, without our models")
    known = "a desktop is active" if desktop_active else "whether a desktop is active is unknown"
    return _line("desktop reserve", -desktop_bytes, f"setting desktop_reserve_mib, {known}")


def _claimed(claims: Claims) -> tuple[BudgetLine, ...]:
    return (
        *_line("our models", -claims.charged_bytes, "the greater of reserved and measured, each"),
        *_line("foreign units", -claims.foreign_unit_bytes, "held now by units that are left alone"),
        *_line("quarantine", -claims.quarantined_bytes, "of ended engines, not seen free again"),
    )


def _under_way(claims: Claims) -> tuple[BudgetLine, ...]:
    return _line("loading models", -claims.still_to_come_bytes, "promised and not taken yet")


def _returning(claims: Claims) -> tuple[BudgetLine, ...]:
    return _line(
        "evictions", claims.returning_bytes, "what would come back of models that would be unloaded"
    )


def _check(card: Card, reading: MemoryReading) -> None:
    figures = {
        "total_bytes": reading.total_bytes,
        "reserved_bytes": reading.reserved_bytes,
        "used_bytes": reading.used_bytes,
        "free_bytes": reading.free_bytes,
    }
    absurd = [f"{name} is {size}" for name, size in figures.items() if size is not None and size < 0]
    if reading.total_bytes == 0:
        absurd.append("total_bytes is 0")
    absurd += [
        f"{name} {size} is more than total_bytes {reading.total_bytes}"
        for name, size in figures.items()
        if size is not None and size > reading.total_bytes
    ]
    if absurd:
        raise LlmError(
            ErrorCode.CARD_UNREADABLE,
            f"The memory of {card.name} was read as something that cannot be: {'; '.join(absurd)}.",
            hint=f"Try again; if it stays so, {_CHECKS.get(card.kind, 'restart the computer.')}",
            card=card.uuid,
            **figures,
        )
