"""NVIDIA cards through NVML (nvidia-ml-py). Management calls only: no compute context.

Figures are those of ``nvmlDeviceGetMemoryInfo_v2``: total = reserved + used + free, where reserved is what
the driver and firmware keep. Version 1, the only one before driver 510, counts reserved as used and does not
tell it apart.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind, CardProcess, MemoryReading
from lllm3090d.planning.quote import MIB

LIBRARY = "libnvidia-ml.so.1"
# Rounding of the driver's own figures; more than that between total and its parts is nonsense.
TOLERANCE_BYTES = 64 * MIB


class NoCardError(Exception):
    """There is no NVIDIA card to read, for a reason that is no fault: no library, no driver, no device."""


class NvmlReader:
    """Reads the NVIDIA card with the most memory. NVML is safe to call from several threads."""

    def __init__(self) -> None:
        """Open the driver's library and choose the card.

        Raises:
            NoCardError: no NVML library, driver not loaded, or no device.
            LlmError: CARD_UNREADABLE where there is a driver and it does not answer properly.
        """
        # Deferred: machines without a card do not pay for the import.
        import pynvml  # noqa: PLC0415

        self._nvml: Any = pynvml
        self._open = False
        try:
            pynvml.nvmlInit()
            self._open = True
            self._handle, self._card = self._choose()
        except pynvml.NVMLError as error:
            self.close()
            if error.value in (
                pynvml.NVML_ERROR_LIBRARY_NOT_FOUND,
                pynvml.NVML_ERROR_DRIVER_NOT_LOADED,
                pynvml.NVML_ERROR_GPU_NOT_FOUND,
            ):
                _raise_if_library_is_broken(error.value == pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
                raise NoCardError(str(error)) from error
            raise self._unreadable("the driver could not be asked", error) from error
        except (NoCardError, LlmError):
            self.close()
            raise

    @property
    def card(self) -> Card:
        """The card that is read."""
        return self._card

    def read(self) -> MemoryReading:
        """The card's memory now. Raises LlmError CARD_UNREADABLE, also for absurd figures."""
        nvml = self._nvml
        try:
            total, reserved, used, free = self._memory()
            processes, known = self._processes()
        except nvml.NVMLError as error:
            raise self._unreadable(f"{self._card.name} could not be read", error) from error
        _check(self._card.name, total, reserved, used, free)
        return MemoryReading(
            taken_monotonic_s=time.monotonic(),
            total_bytes=total,
            reserved_bytes=reserved,
            used_bytes=used,
            free_bytes=free,
            processes=processes,
            processes_known=known,
        )

    def close(self) -> None:
        """Shut NVML down; further reads fail. May be called again."""
        if self._open:
            self._open = False
            try:
                self._nvml.nvmlShutdown()
            except self._nvml.NVMLError as error:
                raise self._unreadable("the driver's library could not be closed", error) from error

    def _choose(self) -> tuple[Any, Card]:
        nvml = self._nvml
        count = nvml.nvmlDeviceGetCount()
        if count == 0:
            raise NoCardError("the NVIDIA driver lists no device")
        driver = nvml.nvmlSystemGetDriverVersion()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        # The first of several equal ones.
        largest = max(handles, key=lambda handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).total))
        card = Card(
            kind=CardKind.NVIDIA,
            uuid=nvml.nvmlDeviceGetUUID(largest),
            name=nvml.nvmlDeviceGetName(largest),
            driver_version=driver,
        )
        return largest, card

    def _memory(self) -> tuple[int, int | None, int, int]:
        """total, reserved, used, free; bytes."""
        nvml = self._nvml
        try:
            info = nvml.nvmlDeviceGetMemoryInfo(self._handle, version=nvml.nvmlMemory_v2)
        except nvml.NVMLError as error:
            if error.value not in (
                nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
                nvml.NVML_ERROR_NOT_SUPPORTED,
                nvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH,
            ):
                raise
            info = nvml.nvmlDeviceGetMemoryInfo(self._handle)
            return int(info.total), None, int(info.used), int(info.free)
        return int(info.total), int(info.reserved), int(info.used), int(info.free)

    def _processes(self) -> tuple[tuple[CardProcess, ...], bool]:
        """Compute and graphics processes, one row a pid; and whether the driver tells (WSL does not)."""
        nvml = self._nvml
        merged: dict[int, int | None] = {}
        known = True
        for function in (
            nvml.nvmlDeviceGetComputeRunningProcesses,
            nvml.nvmlDeviceGetGraphicsRunningProcesses,
        ):
            try:
                rows = function(self._handle)
            except nvml.NVMLError as error:
                if error.value not in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
                    raise
                known = False
                continue
            for row in rows:
                pid, used = int(row.pid), None if row.usedGpuMemory is None else int(row.usedGpuMemory)
                before = merged.get(pid)
                # A process in both lists is shown with all of its memory in each.
                merged[pid] = used if before is None else max(before, used or 0)
        return tuple(CardProcess(pid, used) for pid, used in sorted(merged.items())), known

    def _unreadable(self, what: str, error: Any) -> LlmError:
        nvml = self._nvml
        hints = {
            nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "The driver was updated while it ran: restart the "
            "computer, or reload the nvidia kernel modules.",
            nvml.NVML_ERROR_GPU_IS_LOST: "The card has fallen off the bus: restart the computer; if it "
            "happens again, check power and seating. The reason is in: journalctl -k --grep 'NVRM|Xid'",
            nvml.NVML_ERROR_NO_PERMISSION: "Check that this user may open /dev/nvidiactl.",
        }
        return LlmError(
            ErrorCode.CARD_UNREADABLE,
            f"NVIDIA: {what}: {error} (NVML error {error.value}).",
            hint=hints.get(error.value, "See what nvidia-smi says, and journalctl -k --grep 'NVRM|Xid'"),
            nvml_error=int(error.value),
            nvml_text=str(error),
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


def _check(name: str, total: int, reserved: int | None, used: int, free: int) -> None:
    """Refuse figures that cannot be true: admission must not rest on them."""
    parts = used + free + (reserved or 0)
    if total <= 0 or max(used, free, reserved or 0) > total or parts > total + TOLERANCE_BYTES:
        raise LlmError(
            ErrorCode.CARD_UNREADABLE,
            f"NVIDIA: {name} reports figures that cannot be true: total {total}, reserved {reserved}, "
            f"used {used}, free {free} bytes.",
            hint="See what nvidia-smi says; restart the computer if it shows the same.",
            total_bytes=total,
            reserved_bytes=reserved,
            used_bytes=used,
            free_bytes=free,
        )
