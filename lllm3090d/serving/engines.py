"""Engines as the daemon sees them: which there are, which one the next start uses, and the choice of a person."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path

from lllm3090d.engines.binaries import binaries_digest
from lllm3090d.engines.builds import Selection, find_named, finds, select, usable
from lllm3090d.engines.capabilities import Build, BuildKind, Capabilities
from lllm3090d.engines.choice import write_choice
from lllm3090d.engines.help_text import build_number
from lllm3090d.engines.places import Find
from lllm3090d.engines.probe_cache import ProbeCache
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.settings import Settings
from lllm3090d.store import Store

log = logging.getLogger(__name__)

# A CUDA build answers in about a second; what takes longer is told as being asked, and known the next time.
LIST_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class EngineState:
    """One build: where it is, what it can do or why it cannot be used.

    Attributes:
        found: where it lies.
        build: None where it cannot be executed.
        capabilities: None where it cannot be asked.
        problem: why it cannot be used.
    """

    found: Find
    build: Build | None
    capabilities: Capabilities | None
    problem: LlmError | None


class Engines:
    """The builds of this machine, looked at anew each time; blocking, thread-safe.

    Args:
        settings: the present ones.
        store: where answers and digests are remembered.
    """

    def __init__(self, settings: Callable[[], Settings], store: Callable[[], Store]) -> None:
        self._settings = settings
        self._store = store
        self._probes = ProbeCache(store=store)

    def next(self) -> tuple[Build, Capabilities]:
        """The engine that the next start uses. Raises LlmError ENGINE_..."""
        build = self.selection().use()
        return build, self._probes.get(build)

    def selection(self) -> Selection:
        """What the next start uses, and what came of a choice."""
        return select(self._settings())

    def all(self) -> tuple[EngineState, ...]:
        """Every build, best rank first, all asked at once what they can do; for at most LIST_WAIT_S.

        Raises:
            LlmError: ENGINE_NOT_FOUND as :func:`finds`.
        """
        asked = [(found, self._ask(found)) for found in finds(self._settings())]
        wait([answer for _, (_, answer) in asked], timeout=LIST_WAIT_S)
        return tuple(_told(found, build, answer) for found, (build, answer) in asked)

    def named(self, name: str) -> EngineState:
        """One build by its name, offered or not.

        Raises:
            LlmError: UNKNOWN_ENGINE.
        """
        known = finds(self._settings())
        found = next((each for each in known if each.name == name), None)
        return self._state(found if found is not None else find_named(known, name))

    def of_server(self, server: Path) -> tuple[Build, Capabilities]:
        """The build that an executable is of, offered or not. Raises LlmError ENGINE_..."""
        known = next((each for each in finds(self._settings()) if each.server == server), None)
        build = usable(known or Find(str(server), BuildKind.CANDIDATE, "a unit that runs", server))
        return build, self._probes.get(build)

    def digest(self, build: Build) -> str:
        """Digest of the build's binaries; raises ENGINE_UNUSABLE."""
        return binaries_digest(build, self._store())

    def choose(self, name: str | None) -> Selection:
        """Choose the build that the next start uses; None leaves it to the ranks. What runs goes on.

        Choosing the managed build forgets the record, as it is what comes next without one.

        Raises:
            LlmError: ENGINE_LOCKED where the environment decides; UNKNOWN_ENGINE; ENGINE_... where the build cannot
                be used; STATE_UNUSABLE where the choice cannot be kept.
        """
        settings = self._settings()
        if settings.llama_dir_from_env:
            raise LlmError(
                ErrorCode.ENGINE_LOCKED,
                f"LLLM3090_LLAMA_DIR is set to {settings.llama_dir} in the daemon's environment, which decides.",
                hint="Unset it there (systemctl --user edit lllm3090d), restart the daemon, then choose.",
                llama_dir=str(settings.llama_dir),
            )
        kind = None
        if name is not None:
            found = find_named(finds(settings), name)
            kind = found.kind
            self._probes.get(usable(found), again=True)
        write_choice(settings.state_dir, None if kind is BuildKind.MANAGED else name)
        log.info("an engine was chosen", extra={"engine": name or "automatic"})
        return self.selection()

    def _ask(self, found: Find) -> tuple[Build | None, Future[Capabilities]]:
        try:
            build = usable(found)
        except LlmError as error:
            refused: Future[Capabilities] = Future()
            refused.set_exception(error)
            return None, refused
        return build, self._probes.ask_ahead(build)

    def _state(self, found: Find) -> EngineState:
        build = None
        try:
            build = usable(found)
            return EngineState(found, build, self._probes.get(build), None)
        except LlmError as error:
            return EngineState(found, build, None, error)


def _told(found: Find, build: Build | None, answer: Future[Capabilities]) -> EngineState:
    """What came of asking a build."""
    if build is not None and not answer.done():
        problem = LlmError(
            ErrorCode.ENGINE_UNUSABLE,
            f"{build.server} has not answered for {LIST_WAIT_S:g} s and is still being asked what it can do.",
            hint="List the engines again in a while.",
            path=str(build.server),
        )
        return EngineState(found, build, None, problem)
    try:
        return EngineState(found, build, answer.result(), None)
    except LlmError as error:
        return EngineState(found, build, None, error)


def release_tag(tag: str | None, capabilities: Capabilities | None) -> str | None:
    """The upstream release of a build: that of its name or package, else of its version; None unknown."""
    number = build_number(capabilities.version) if tag is None and capabilities else None
    return tag if number is None else f"b{number}"


def is_stale(tag: str | None, pin: str) -> bool | None:
    """Another release than the pinned one; None where nobody knows the release."""
    return None if tag is None else tag.removeprefix("b") != pin.removeprefix("b")
