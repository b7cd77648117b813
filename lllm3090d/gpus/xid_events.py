"""Xid errors as NVML tells them: registered once for each card and taken with readings, without waiting.

A thread that waits for events would still be inside the library when another one shuts it down to get a lost card
back, which NVML does not allow. The library keeps what has happened since, so nothing is missed between two readings;
and nothing rests on an error before the next reading.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

from lllm3090d.gpus.xids import Xid

log = logging.getLogger(__name__)

MOST_AT_ONCE = 256


class XidEvents:
    """The events of one initialisation of the library; whoever calls it holds the session's lock.

    Args:
        nvml: the binding.
    """

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._set: Any = None
        self._cards: dict[int, str] = {}  # handle -> UUID
        self._found: dict[str, list[Xid]] = {}  # by UUID, not taken yet
        self._problems: dict[str, str] = {}  # by UUID
        # Not for now, but for good: somebody else must tell.
        self._refusals = frozenset(
            {
                nvml.NVML_ERROR_INVALID_ARGUMENT,
                nvml.NVML_ERROR_NOT_SUPPORTED,
                nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
            }
        )

    def register(self, handle: Any, uuid: str) -> None:
        """Be told of a card from now on; what that needs may be missing."""
        nvml = self._nvml
        try:
            if self._set is None:
                self._set = nvml.nvmlEventSetCreate()
            nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._set)
        except nvml.NVMLError as error:
            self._refused(uuid, error)
            return
        self._problems.pop(uuid, None)
        self._cards[_address(handle)] = uuid

    def problem(self, uuid: str) -> str:
        """Why NVML does not tell of errors of a card; empty where it does."""
        return self._problems.get(uuid, "")

    def _refused(self, uuid: str, error: Exception) -> None:
        if uuid not in self._problems:
            log.info("NVML does not tell of errors of a card", extra={"card": uuid, "reason": str(error)})
        self._problems[uuid] = str(error)

    def take(self, uuid: str) -> tuple[Xid, ...]:
        """What has happened to a card since the last call."""
        self._collect()
        return tuple(self._found.pop(uuid, ()))

    def _collect(self) -> None:
        nvml = self._nvml
        for _ in range(MOST_AT_ONCE if self._set is not None else 0):
            try:
                event = nvml.nvmlEventSetWait_v2(self._set, 0)
            except nvml.NVMLError as error:
                if error.value in self._refusals:
                    for followed in self._cards.values():
                        self._refused(followed, error)
                elif error.value != nvml.NVML_ERROR_TIMEOUT:
                    log.debug("events of NVML cannot be read now", extra={"reason": str(error)})
                return
            uuid = self._cards.get(_address(event.device))
            if uuid is not None and event.eventType & nvml.nvmlEventTypeXidCriticalError:
                self._found.setdefault(uuid, []).append(Xid(int(event.eventData)))

    def end(self) -> None:
        """The library is about to be shut down; what was told stays to be taken."""
        nvml = self._nvml
        self._collect()
        if self._set is not None:
            try:
                nvml.nvmlEventSetFree(self._set)
            except nvml.NVMLError as error:
                log.debug("events of NVML cannot be given back", extra={"reason": str(error)})
        self._set = None
        self._cards = {}


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
