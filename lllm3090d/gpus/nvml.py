"""NVIDIA cards through NVML (nvidia-ml-py). Management calls only: no compute context.

Figures are those of ``nvmlDeviceGetMemoryInfo_v2``: total = reserved + used + free, where reserved is what
the driver and firmware keep. Version 1, the only one before driver 510, counts reserved as used and does not
tell it apart.

A card goes by its UUID. After a failed reading its handle is asked for again, and where NVML itself has lost the card
the library is shut down and initialised again, so that a card that comes back is read again.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.kernel_messages import KernelMessages
from lllm3090d.gpus.lost_cards import MissingReader
from lllm3090d.gpus.readings import (
    Card,
    CardKind,
    CardProcess,
    CardReader,
    MemoryReading,
    NoCardError,
    PcieLink,
    normal_pci_address,
)
from lllm3090d.gpus.xid_events import XidEvents
from lllm3090d.gpus.xids import CardErrors, Xid, xids_in
from lllm3090d.planning.units import MIB

log = logging.getLogger(__name__)

LIBRARY = "libnvidia-ml.so.1"
# Rounding of the driver's own figures; more than that between total and its parts is nonsense.
TOLERANCE_BYTES = 64 * MIB
# First driver whose Vulkan the engine's releases are made for; older ones lack extensions or are slow.
MIN_DRIVER_VERSION = 550
# Between two attempts to initialise the library again: with a lost card each may take long.
RESTART_PAUSE_S = 5.0
# NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, of drivers since 570.
RECOVERY_ACTION_FIELD = 230
ACTION_EVERY_S = 2.0  # the driver is asked for it anew; and with each error
SEE = "See what nvidia-smi says, and journalctl -k --grep 'NVRM|Xid'"


def open_nvidia(
    restart_pause_s: float = RESTART_PAUSE_S, expected: Sequence[Card] = ()
) -> tuple[CardReader, ...]:
    """A reader for each NVIDIA card, the one with the most memory first; of equal ones in NVML's order.

    A card that cannot even be identified is left out with a warning where there are others.

    Args:
        restart_pause_s: least seconds between two attempts to initialise the library again.
        expected: cards that are to have a reader although they are not listed; it fails until they are back.

    Raises:
        NoCardError: no NVML library, driver not loaded, or no device.
        LlmError: CARD_UNREADABLE where there is a driver and it does not answer properly.
    """
    session = _Session(restart_pause_s)
    nvml = session.nvml
    try:
        session.start()
        count = int(nvml.nvmlDeviceGetCount())
        if count == 0:
            raise NoCardError("the NVIDIA driver lists no device", is_installed=True)
        driver = str(nvml.nvmlSystemGetDriverVersion())
        readers: list[CardReader] = list(_identified(session, count, driver))
    except nvml.NVMLError as error:
        session.give_up()
        if error.value in (
            nvml.NVML_ERROR_LIBRARY_NOT_FOUND,
            nvml.NVML_ERROR_DRIVER_NOT_LOADED,
            nvml.NVML_ERROR_GPU_NOT_FOUND,
        ):
            is_missing = error.value == nvml.NVML_ERROR_LIBRARY_NOT_FOUND
            _raise_if_library_is_broken(is_missing)
            raise NoCardError(str(error), is_installed=not is_missing) from error
        raise session.unreadable("the driver could not be asked", error) from error
    except NoCardError:
        session.give_up()
        raise
    listed = {reader.card.uuid for reader in readers}
    readers += [MissingReader(NvmlReader(session, card)) for card in expected if card.uuid not in listed]
    session.users = len(readers)
    return tuple(sorted(readers, key=lambda reader: -reader.card.total_bytes))


def driver_problem(version: str) -> str:
    """What a person should know of a driver of this version; empty where nothing."""
    major = version.partition(".")[0]
    if not major.isdecimal() or int(major) >= MIN_DRIVER_VERSION:
        return ""
    return (
        f"NVIDIA driver {version} is older than {MIN_DRIVER_VERSION}, which engines with Vulkan need:"
        " install a newer one."
    )


def _identified(session: _Session, count: int, driver: str) -> list[NvmlReader]:
    readers, failure = [], None
    for index in range(count):
        try:
            handle = session.nvml.nvmlDeviceGetHandleByIndex(index)
            readers.append(NvmlReader(session, _card(session.nvml, handle, driver)))
        except session.nvml.NVMLError as error:
            failure = error
            log.warning("NVIDIA card %d is left out: %s", index, error)
    if failure is not None and not readers:
        raise failure
    return readers


def _card(nvml: Any, handle: Any, driver: str) -> Card:
    """What does not change of a card. Raises NVMLError where it cannot be identified."""

    def told(function: Callable[[Any], Any]) -> Any:
        """Of what may be missing: None."""
        try:
            return function(handle)
        except nvml.NVMLError as error:
            log.info("%s does not tell: %s", function.__name__, error)
            return None

    uuid, name = str(nvml.nvmlDeviceGetUUID(handle)), str(nvml.nvmlDeviceGetName(handle))
    memory, pci = told(nvml.nvmlDeviceGetMemoryInfo), told(nvml.nvmlDeviceGetPciInfo)
    capability = told(nvml.nvmlDeviceGetCudaComputeCapability)
    # An idle card lowers the generation of its link, not the lanes; a slot with fewer of them shows only in use.
    generation = told(nvml.nvmlDeviceGetMaxPcieLinkGeneration)
    width = told(nvml.nvmlDeviceGetCurrPcieLinkWidth) or told(nvml.nvmlDeviceGetMaxPcieLinkWidth)
    bus_id = "" if pci is None else pci.busId
    return Card(
        kind=CardKind.NVIDIA,
        uuid=uuid,
        name=name,
        driver_version=driver,
        total_bytes=0 if memory is None else int(memory.total),
        pci_address=normal_pci_address(
            bus_id if isinstance(bus_id, str) else bus_id.decode("ascii", "replace")
        ),
        compute_capability=None if capability is None else f"{capability[0]}.{capability[1]}",
        link=PcieLink(int(generation), int(width)) if generation and width else None,
        driver_problem=driver_problem(driver),
    )


class _Session:
    """The library, initialised once for all cards; whoever calls it holds ``lock``."""

    def __init__(self, restart_pause_s: float) -> None:
        # Deferred: machines without a card do not pay for the import.
        import pynvml  # noqa: PLC0415

        self.nvml: Any = pynvml
        self.lock = threading.RLock()
        self.users = 0
        self.generation = 0  # of initialisations: handles of an earlier one are worth nothing
        self._restart_pause_s = restart_pause_s
        self._open = False
        self._restarted_s: float | None = None
        self._failure: Exception | None = None  # of the last attempt to initialise
        self.events = XidEvents(pynvml)
        self._kernel: KernelMessages | None = None  # where NVML does not tell of errors
        self._kernel_xids: dict[str, list[Xid]] = {}  # by PCI address, not taken yet

    def start(self) -> None:
        """Initialise. Raises NVMLError."""
        try:
            self.nvml.nvmlInit()
        except self.nvml.NVMLError as error:
            self._failure = error
            raise
        self._open = True
        self._failure = None
        self.generation += 1

    def stop(self) -> None:
        """Shut down. Raises NVMLError."""
        if self._open:
            self._open = False
            self.events.end()
            self.nvml.nvmlShutdown()

    def restart(self) -> None:
        """Shut down and initialise again, unless that was done a moment ago. Raises NVMLError."""
        now_s = time.monotonic()
        if self._restarted_s is not None and now_s - self._restarted_s < self._restart_pause_s:
            if self._failure is not None:
                raise self._failure
            return
        self._restarted_s = now_s
        self.give_up()
        self.start()

    def give_up(self) -> None:
        """Shut down a library of which nothing is expected any more."""
        try:
            self.stop()
        except self.nvml.NVMLError as error:
            log.warning("NVML could not be shut down: %s", error)

    def leave(self) -> None:
        """One reader fewer; the last one shuts down. Raises LlmError CARD_UNREADABLE."""
        self.users -= 1
        if self.users == 0:
            if self._kernel is not None:
                self._kernel.close()
            try:
                self.stop()
            except self.nvml.NVMLError as error:
                raise self.unreadable("the driver's library could not be closed", error) from error

    def kernel(self) -> KernelMessages:
        """The kernel's messages from the first call on."""
        if self._kernel is None:
            self._kernel = KernelMessages()
        return self._kernel

    def kernel_xids(self, address: str) -> tuple[Xid, ...]:
        """Errors of a card that the kernel has told since the last call."""
        for where, xid in xids_in(self.kernel().new()):
            self._kernel_xids.setdefault(where, []).append(xid)
        # The driver names the card, not the function on it.
        return tuple(self._kernel_xids.pop(address.partition(".")[0] + ".0", ()))

    def lost(self, error: Any) -> bool:
        """The library has to be initialised again before this card can be read."""
        nvml = self.nvml
        return error.value in (
            nvml.NVML_ERROR_UNINITIALIZED,
            nvml.NVML_ERROR_NOT_FOUND,
            nvml.NVML_ERROR_DRIVER_NOT_LOADED,
            nvml.NVML_ERROR_GPU_IS_LOST,
            nvml.NVML_ERROR_RESET_REQUIRED,
            nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH,
            nvml.NVML_ERROR_GPU_NOT_FOUND,
        )

    def optional(self, error: Any) -> bool:
        """The driver or this card does not offer the call."""
        nvml = self.nvml
        return error.value in (
            nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            nvml.NVML_ERROR_NOT_SUPPORTED,
            nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
        )

    def unreadable(self, what: str, error: Any) -> LlmError:
        """The failure as it is told."""
        nvml = self.nvml
        hints = {
            nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "The driver was updated while it ran: restart the "
            "computer, or reload the nvidia kernel modules and restart lllm3090d.",
            nvml.NVML_ERROR_GPU_IS_LOST: "The card has fallen off the bus: restart the computer; if it "
            "happens again, check power and seating. The reason is in: journalctl -k --grep 'NVRM|Xid'",
            nvml.NVML_ERROR_NO_PERMISSION: "Check that this user may open /dev/nvidiactl.",
        }
        return LlmError(
            ErrorCode.CARD_UNREADABLE,
            f"NVIDIA: {what}: {error} (NVML error {error.value}).",
            hint=hints.get(error.value, SEE),
            nvml_error=int(error.value),
            nvml_text=str(error),
        )


class NvmlReader:
    """Reads one NVIDIA card; made by :func:`open_nvidia`. May be used from several threads."""

    def __init__(self, session: _Session, card: Card) -> None:
        self._session = session
        self._card = card
        self._handle: Any = None
        self._handle_generation = 0
        self._lost_generation: int | None = None  # in which the library lost the card
        self._followed_generation = 0  # in which the library was asked to tell of errors
        self._returns = 0
        self._action: int | None = None  # that the driver asked for last, and when it was asked
        self._action_s = float("-inf")
        self._is_away = False
        self._closed = False

    @property
    def card(self) -> Card:
        """The card that is read."""
        return self._card

    def read(self) -> MemoryReading:
        """The card's memory now. Raises LlmError CARD_UNREADABLE, also for absurd figures and a total that changed."""
        session = self._session
        with session.lock:
            if self._closed:
                raise self._refused("its reader is closed", "Open the card again.")
            try:
                handle = self._acquire()
                total, reserved, used, free = self._memory(handle)
                processes, known = self._processes(handle)
                busy_percent, memory_busy_percent = self._utilisation(handle)
            except session.nvml.NVMLError as error:
                self._handle = None
                self._lost_generation = session.generation if session.lost(error) else None
                self._is_away = self._is_away or self._lost_generation is not None
                raise session.unreadable(f"{self._card.name} could not be read", error) from error
        if self._is_away:
            self._is_away = False
            self._returns += 1
        self._check(total, reserved, used, free, processes)
        if not self._card.total_bytes:
            self._card = dataclasses.replace(self._card, total_bytes=total)
        return MemoryReading(
            taken_monotonic_s=time.monotonic(),
            total_bytes=total,
            reserved_bytes=reserved,
            used_bytes=used,
            free_bytes=free,
            processes=processes,
            processes_known=known,
            busy_percent=busy_percent,
            memory_busy_percent=memory_busy_percent,
        )

    def errors(self) -> CardErrors:
        """What the driver has reported since the last call; to be asked after :meth:`read`."""
        session = self._session
        with session.lock:
            if self._closed:
                return CardErrors(returns=self._returns)
            xids = session.events.take(self._card.uuid)
            source = "NVML"
            if session.events.problem(self._card.uuid):
                xids += session.kernel_xids(self._card.pci_address)
                source = "" if session.kernel().problem else "the kernel's messages"
            now_s = time.monotonic()
            if xids or now_s - self._action_s >= ACTION_EVERY_S:
                self._action, self._action_s = self._recovery_action(), now_s
            return CardErrors(xids, self._action, self._returns, source)

    def _recovery_action(self) -> int | None:
        nvml = self._session.nvml
        if self._handle is None:
            return None
        try:
            (value,) = nvml.nvmlDeviceGetFieldValues(self._handle, [RECOVERY_ACTION_FIELD])
        except nvml.NVMLError as error:
            log.debug("the driver does not tell what it asks for", extra={"reason": str(error)})
            return None
        return int(value.value.uiVal) if value.nvmlReturn == nvml.NVML_SUCCESS else None

    def close(self) -> None:
        """Further reads fail; the last reader shuts NVML down. May be called again. Raises LlmError CARD_UNREADABLE."""
        with self._session.lock:
            if not self._closed:
                self._closed = True
                self._session.leave()

    def _acquire(self) -> Any:
        """The handle of this initialisation of the library. Raises NVMLError, LlmError for a card in parts."""
        session = self._session
        if self._lost_generation == session.generation:
            session.restart()
            self._lost_generation = None
        if self._handle is None or self._handle_generation != session.generation:
            handle = session.nvml.nvmlDeviceGetHandleByUUID(self._card.uuid)
            if self._is_in_parts(handle):
                raise self._refused(
                    "it is divided (MIG), and what a part has left is not told here",
                    f"Undivide it: sudo nvidia-smi -i {self._card.uuid} -mig 0",
                )
            self._handle, self._handle_generation = handle, session.generation
            if self._followed_generation != session.generation:
                self._followed_generation = session.generation
                session.events.register(handle, self._card.uuid)
        return self._handle

    def _is_in_parts(self, handle: Any) -> bool:
        nvml = self._session.nvml
        try:
            current, _ = nvml.nvmlDeviceGetMigMode(handle)
        except nvml.NVMLError as error:
            if not self._session.optional(error):
                raise
            return False
        return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)

    def _memory(self, handle: Any) -> tuple[int, int | None, int, int]:
        """total, reserved, used, free; bytes."""
        nvml = self._session.nvml
        try:
            info = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        except nvml.NVMLError as error:
            if not self._session.optional(error):
                raise
            info = nvml.nvmlDeviceGetMemoryInfo(handle)
            return int(info.total), None, int(info.used), int(info.free)
        return int(info.total), int(info.reserved), int(info.used), int(info.free)

    def _utilisation(self, handle: Any) -> tuple[int | None, int | None]:
        """How busy it and its memory are, percent; unknown where that fails: no admission rests on it."""
        nvml = self._session.nvml
        try:
            rates = nvml.nvmlDeviceGetUtilizationRates(handle)
        except nvml.NVMLError as error:
            log.debug("the driver does not tell how busy the card is", extra={"reason": str(error)})
            return None, None
        return int(rates.gpu), int(rates.memory)

    def _processes(self, handle: Any) -> tuple[tuple[CardProcess, ...], bool]:
        """Compute and graphics processes, one row a pid; and whether the driver tells (WSL does not)."""
        nvml = self._session.nvml
        merged: dict[int, int | None] = {}
        known = True
        for function in (
            nvml.nvmlDeviceGetComputeRunningProcesses,
            nvml.nvmlDeviceGetGraphicsRunningProcesses,
        ):
            try:
                rows = function(handle)
            except nvml.NVMLError as error:
                if not self._session.optional(error):
                    raise
                known = False
                continue
            for row in rows:
                pid, used = int(row.pid), None if row.usedGpuMemory is None else int(row.usedGpuMemory)
                before = merged.get(pid)
                # A process in both lists is shown with all of its memory in each.
                merged[pid] = used if before is None else max(before, used or 0)
        return tuple(CardProcess(pid, used) for pid, used in sorted(merged.items())), known

    def _check(
        self, total: int, reserved: int | None, used: int, free: int, processes: tuple[CardProcess, ...]
    ) -> None:
        """Refuse figures that cannot be true: admission must not rest on them."""
        figures = {
            "total_bytes": total,
            "reserved_bytes": reserved,
            "used_bytes": used,
            "free_bytes": free,
        }
        parts = used + free + (reserved or 0)
        if total <= 0 or max(used, free, reserved or 0) > total or parts > total + TOLERANCE_BYTES:
            raise self._refused(
                f"its figures cannot be true: total {total}, reserved {reserved}, used {used}, free {free} bytes",
                "See what nvidia-smi says; restart the computer if it shows the same.",
                **figures,
            )
        if self._card.total_bytes not in (0, total):
            raise self._refused(
                f"its total was {self._card.total_bytes} bytes and is now {total}, which cannot be the same card",
                "If that is right: systemctl --user restart lllm3090d",
                **figures,
            )
        for process in processes:
            if (process.used_bytes or 0) > total:
                raise self._refused(
                    f"process {process.pid} is said to hold {process.used_bytes} of {total} bytes, and cannot",
                    SEE,
                    pid=process.pid,
                    **figures,
                )

    def _refused(self, why: str, hint: str, **details: int | None) -> LlmError:
        return LlmError(
            ErrorCode.CARD_UNREADABLE,
            f"NVIDIA: {self._card.name} could not be read: {why}.",
            hint=hint,
            card=self._card.uuid,
            **details,
        )


def _raise_if_library_is_broken(not_loaded: bool) -> None:
    """The binding reports every failure to load the library as "not found"; a damaged one is a fault."""
    if not not_loaded:
        return
    try:
        ctypes.CDLL(LIBRARY)
    except OSError as error:
        if str(error).startswith(f"{LIBRARY}: cannot open shared object file: No such file"):
            return
        raise LlmError(
            ErrorCode.CARD_UNREADABLE,
            f"NVIDIA: the driver's library cannot be loaded: {error}.",
            hint='Reinstall the NVIDIA driver, or set card = "cpu" to do without the card.',
            nvml_text=str(error),
        ) from error
