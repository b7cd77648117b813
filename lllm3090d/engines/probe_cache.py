"""Answers of builds that were asked before, in memory and in SQLite, so that a restarted daemon asks nothing.

What a build says of itself is valid while its files are the same; its list of devices also depends on the
machine, so that one is asked anew after each boot, and when graphics cards come or go.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import sqlite3
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from lllm3090d.engines.binaries import Stamp, fingerprint, has_gpu_library
from lllm3090d.engines.capabilities import AddressedDevice, Backend, Build, Capabilities
from lllm3090d.engines.probe import TIME_LIMIT_S, Texts, ask, ask_devices, capabilities_of
from lllm3090d.engines.visibility import DEVICE_VARIABLES
from lllm3090d.engines.vulkan_probe import with_addresses
from lllm3090d.errors import LlmError
from lllm3090d.store import Store

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Graphics cards as the kernel shows them; NVIDIA's driver may do without DRM.
DRM_CLASS = Path("/sys/class/drm")
NVIDIA_CARDS = Path("/proc/driver/nvidia/gpus")
_DRM_NODE = re.compile(r"(?:card|renderD)\d+")
# A build for a GPU that sees none may do so later, when a driver has been loaded.
NO_DEVICE_RETRY_S = 60.0
# Which device is at which address costs two programs to ask; without it they are told apart by name.
ADDRESS_RETRY_S = 600.0
# A failure is remembered where finding it again would be slow; one that comes at once may as well be found anew, and
# is gone as soon as its cause is.
SLOW_FAILURE_S = 1.0
FAILURE_KEPT_S = 60.0
MOST_ASKED_AT_ONCE = 8  # of those that are asked ahead

_SELECT_TEXTS = "SELECT body FROM engine_answers WHERE server = ? AND fingerprint = ?"
_SELECT_DEVICES = (
    "SELECT devices, addressed FROM engine_devices WHERE server = ? AND fingerprint = ? AND surroundings = ?"
)


@dataclass(frozen=True, slots=True)
class _Known:
    """What is remembered of a build with these files, its devices in these surroundings."""

    files: tuple[Stamp, ...]
    around: str
    texts: Texts
    capabilities: Capabilities | None = None
    until_s: float = float("inf")  # monotonic


@dataclass(frozen=True, slots=True)
class _Failed:
    """That a build with these files could not be asked."""

    files: tuple[Stamp, ...]
    error: LlmError
    until_s: float  # monotonic


class ProbeCache:
    """Remembers answers as long as the build's files are the same. Thread-safe; no build waits for another.

    A failure, or an unknown backend, is remembered for FAILURE_KEPT_S where it took SLOW_FAILURE_S or longer to find,
    in memory only; else the next call asks again.

    Args:
        time_limit_s: for each command.
        store: gives the place where answers outlive the process; None for memory alone.
        clock: monotonic, in seconds.
    """

    def __init__(
        self,
        *,
        time_limit_s: float = TIME_LIMIT_S,
        store: Callable[[], Store] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._time_limit_s = time_limit_s
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()  # never held while a build is asked
        self._known: dict[Path, _Known] = {}
        self._failed: dict[Path, _Failed] = {}
        self._asking: dict[tuple[Path, tuple[Stamp, ...]], Future[Capabilities]] = {}
        self._ahead: dict[Path, Future[Capabilities]] = {}
        self._executor = ThreadPoolExecutor(MOST_ASKED_AT_ONCE, "engine")

    def get(self, build: Build, *, again: bool = False) -> Capabilities:
        """The capabilities of the build, asked where they are not known; simultaneous callers share one probe.

        Args:
            build: the build.
            again: also where it is remembered that it could not be asked.

        Raises:
            LlmError: as ``probe``.
        """
        files = fingerprint(build)
        with self._lock:
            remembered = self._remembered(build, files, again=again)
            if remembered is not None:
                return remembered
            asking = self._asking.get((build.server, files))
            if asking is None:
                answer = self._asking[build.server, files] = Future[Capabilities]()
                texts = self._texts(build, files)
        if asking is not None:
            return asking.result()
        began_s = self._clock()
        try:
            found = self._look(build, files, texts, began_s)
        except BaseException as error:
            with self._lock:
                if isinstance(error, LlmError) and self._is_slow(began_s):
                    until_s = self._clock() + FAILURE_KEPT_S
                    self._failed[build.server] = _Failed(files, error, until_s)
                del self._asking[build.server, files]
            answer.set_exception(error)
            raise
        with self._lock:
            self._failed.pop(build.server, None)
            del self._asking[build.server, files]
        answer.set_result(found)
        return found

    def ask_ahead(self, build: Build) -> Future[Capabilities]:
        """As :meth:`get`, without waiting; a build that is being asked so is not asked twice."""
        known: Future[Capabilities] = Future()
        try:
            files = fingerprint(build)
            with self._lock:
                remembered = self._remembered(build, files, again=False)
                if remembered is None:
                    ahead = self._ahead.get(build.server)
                    if ahead is None or ahead.done():
                        ahead = self._ahead[build.server] = self._executor.submit(self.get, build)
                    return ahead
            known.set_result(remembered)
        except LlmError as error:
            known.set_exception(error)
        return known

    def _remembered(self, build: Build, files: tuple[Stamp, ...], *, again: bool) -> Capabilities | None:
        now_s = self._clock()
        known = self._known.get(build.server)
        is_same = known is not None and known.files == files and known.around == surroundings(os.environ)
        if known is not None and is_same and known.capabilities is not None:
            is_sure = known.capabilities.backend is not Backend.UNKNOWN
            if now_s < known.until_s and (is_sure or not again):
                return known.capabilities
        failed = self._failed.get(build.server)
        if failed is not None and failed.files == files and now_s < failed.until_s and not again:
            raise failed.error
        return None

    def _texts(self, build: Build, files: tuple[Stamp, ...]) -> Texts | None:
        known = self._known.get(build.server)
        return known.texts if known is not None and known.files == files else None

    def _is_slow(self, began_s: float) -> bool:
        return self._clock() - began_s >= min(SLOW_FAILURE_S, self._time_limit_s)

    def _look(
        self, build: Build, files: tuple[Stamp, ...], texts: Texts | None, began_s: float
    ) -> Capabilities:
        """From the store what it has, the rest from the build."""
        key, around = _digest(files), surroundings(os.environ)
        texts = texts or self._stored_texts(build, key)
        devices, addressed = self._stored_devices(build, key, around) if texts else (None, ())
        fresh_texts, fresh_devices = texts is None, devices is None
        if texts is None:
            texts, devices = ask(build, time_limit_s=self._time_limit_s)
        elif devices is None:
            devices = ask_devices(build, time_limit_s=self._time_limit_s)
        hidden_by = tuple((name, os.environ[name]) for name in DEVICE_VARIABLES if name in os.environ)
        found = replace(
            capabilities_of(build, texts, devices), device_environment=hidden_by, addressed=addressed
        )
        if not addressed:
            found = with_addresses(build, found, time_limit_s=self._time_limit_s)
        is_news = fresh_devices or found.addressed != addressed
        if (fresh_texts or is_news) and fingerprint(build) != files:
            # Exchanged while it was asked: the answer may be of either build, so it is not kept.
            with self._lock:
                self._known.pop(build.server, None)
            return found
        is_sure = found.backend is not Backend.UNKNOWN
        may_change = found.backend is Backend.CPU and has_gpu_library(build)
        until_s = float("inf")
        if not is_sure:
            until_s = self._clock() + FAILURE_KEPT_S
        elif may_change:
            until_s = self._clock() + NO_DEVICE_RETRY_S
        elif found.unaddressed_because:
            until_s = self._clock() + ADDRESS_RETRY_S
        is_kept = is_sure or self._is_slow(began_s)
        with self._lock:
            self._known[build.server] = _Known(files, around, texts, found if is_kept else None, until_s)
        self._write(build, key, texts if fresh_texts else None)
        if is_news and devices is not None and is_sure and not may_change:
            self._write_devices(build, key, around, devices, found.addressed)
        return found

    def _stored_texts(self, build: Build, key: str) -> Texts | None:
        rows = self._store().rows(_SELECT_TEXTS, (_path(build), key)) if self._store else []
        return unpack(rows[0][0]) if rows else None

    def _stored_devices(
        self, build: Build, key: str, around: str
    ) -> tuple[str | None, tuple[AddressedDevice, ...]]:
        rows = self._store().rows(_SELECT_DEVICES, (_path(build), key, around)) if self._store else []
        return (str(rows[0][0]), unpack_addressed(rows[0][1])) if rows else (None, ())

    def _write(self, build: Build, key: str, texts: Texts | None) -> None:
        if self._store is None or texts is None:
            return
        row = (_path(build), key, pack(texts))

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT OR REPLACE INTO engine_answers VALUES (?, ?, ?)", row)
            connection.execute("DELETE FROM engine_devices WHERE server = ?", (row[0],))

        self._store().change(write)

    def _write_devices(
        self, build: Build, key: str, around: str, devices: str, addressed: tuple[AddressedDevice, ...]
    ) -> None:
        if self._store is None:
            return
        row = (_path(build), key, around, devices, pack_addressed(addressed))
        statement = "INSERT OR REPLACE INTO engine_devices VALUES (?, ?, ?, ?, ?)"
        self._store().change(lambda connection: connection.execute(statement, row))


def surroundings(environment: Mapping[str, str]) -> str:
    """Digest of what a list of devices depends on beside the build.

    This boot, variables that hide devices, and the graphics cards that are there: one that comes or goes moves others.
    """
    try:
        boot = BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        boot = str(os.getpid())  # cannot be told apart, so the list is good for this daemon alone
    values = [boot, *(environment.get(name, "") for name in (*DEVICE_VARIABLES, "LD_LIBRARY_PATH"))]
    values += [
        f"{node.name} {node.resolve()}" for node in _entries(DRM_CLASS) if _DRM_NODE.fullmatch(node.name)
    ]
    values += [card.name for card in _entries(NVIDIA_CARDS)]
    return hashlib.blake2b(json.dumps(values).encode(), digest_size=16).hexdigest()


def pack(texts: Texts) -> bytes:
    """The answers as they are stored."""
    program = texts.dry_run_program
    values = [
        texts.version,
        texts.usage,
        os.fsencode(program).hex() if program else None,
        texts.dry_run_usage,
    ]
    return zlib.compress(json.dumps(values).encode())


def unpack(body: bytes) -> Texts | None:
    """What :func:`pack` made; None for anything else, which is then asked again."""
    try:
        version, usage, program, dry_run_usage = json.loads(zlib.decompress(body))
        path = Path(os.fsdecode(bytes.fromhex(program))) if program else None
    except (zlib.error, ValueError, TypeError):
        return None
    return Texts(str(version), str(usage), path, str(dry_run_usage))


def pack_addressed(devices: tuple[AddressedDevice, ...]) -> str | None:
    """The devices as they are stored; None for none."""
    return json.dumps([dataclasses.astuple(device) for device in devices]) if devices else None


def unpack_addressed(body: str | None) -> tuple[AddressedDevice, ...]:
    """What :func:`pack_addressed` made; none for anything else, which is then asked again."""
    try:
        rows = [] if body is None else json.loads(body)
        made = tuple(
            AddressedDevice(int(index), str(at), str(name), int(size)) for index, at, name, size in rows
        )
    except (ValueError, TypeError):
        return ()
    return made


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except OSError:
        return []  # no such driver


def _path(build: Build) -> bytes:
    return os.fsencode(build.server)


def _digest(files: tuple[Stamp, ...]) -> str:
    return hashlib.blake2b(repr(files).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
