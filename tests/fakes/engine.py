"""A fake llama-server: the real command line and HTTP API on a Unix socket; misbehaves on demand.

Stdlib only, since a copy of this file is the executable (see :func:`install_fake_engine`). What it does is
read from the JSON file that FAKE_ENGINE_BEHAVIOUR names, else from ``behaviour.json`` beside it; the keys
are the fields of :class:`Behaviour`. Answering requests re-reads it, so a test can let a running engine
hang.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import resource
import signal
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

MIB = 1 << 20
BEHAVIOUR_FILE = "behaviour.json"


@dataclass(frozen=True)
class Behaviour:
    """What the engine does.

    Attributes:
        version: the line that ``--version`` prints.
        devices: lines of ``--list-devices`` without the indent; none for a CPU build. Those of a Vulkan build are all
            that its loader has, in its order, and GGML_VK_VISIBLE_DEVICES chooses among them.
        vulkan_cards: of each of those the place of its card in the state file; for a Vulkan build.
        missing_flags: options that this build does not know.
        load_s: seconds from start to ready.
        steps: pieces in which memory is claimed while loading.
        step_reads_kib: KiB of the model's file read in each of them; memory of its own it takes none for that.
        vram_mib: MiB claimed on the fake card of ``nvml_state``; out of memory when the card has less free.
        vram_mib_of: the same for single models by their alias, before vram_mib.
        prompt_vram_mib: MiB claimed on the fake card with the first completion, as real buffers for prompts are.
        host_mib: MiB of host memory really allocated.
        nvml_state: state file of the fake card; default FAKE_NVML_STATE.
        crash_during_load: ``{"exit": 1}`` or ``{"signal": "SIGSEGV"}`` (not SIGTERM or SIGINT), and
            ``"lines": [...]`` said before.
        oom: run out of card memory half-way, whatever is free.
        crash_after_tokens: abort when so many tokens have been sent.
        hang: answer ``/health``, send no tokens.
        held: completions wait until the behaviour no longer says so; its slots show no progress meanwhile.
        prompt_steps: batches of a prompt, each of them shown by its slot when it is computed.
        prompt_step_s: seconds for each of them.
        load_held: the load waits before its last step until the behaviour no longer says so.
        ignore_sigterm: only SIGKILL ends it.
        hold_after_exit_s: seconds for which the card shows the memory after the end.
        tokens: words of every answer.
        token_s: seconds between them.
    """

    version: str = "version: 0.6.0-dev (build 0, commit unknown)"
    devices: tuple[str, ...] = ()
    vulkan_cards: tuple[int, ...] = ()
    missing_flags: tuple[str, ...] = ()
    load_s: float = 0.0
    steps: int = 4
    step_reads_kib: int = 0
    vram_mib: int = 0
    vram_mib_of: dict[str, int] = dataclasses.field(default_factory=dict)
    prompt_vram_mib: int = 0
    host_mib: int = 0
    nvml_state: str | None = None
    crash_during_load: dict[str, Any] | None = None
    oom: bool = False
    crash_after_tokens: int | None = None
    hang: bool = False
    held: bool = False
    prompt_steps: int = 0
    prompt_step_s: float = 0.0
    load_held: bool = False
    ignore_sigterm: bool = False
    hold_after_exit_s: float = 0.0
    tokens: tuple[str, ...] = ("Hello", " from", " the", " fake", " engine", ".")
    token_s: float = 0.0


VECTORS = ("/v1/embeddings", "/embedding")
SCORES = ("/v1/rerank",)
# Spellings, value, description, variable: the part of the real command line that matters to a launch.
OPTIONS: tuple[tuple[str, str, str, str], ...] = (
    ("-h, --help, --usage", "", "print usage and exit", ""),
    ("--version", "", "show version and build info", ""),
    ("--list-devices", "", "print list of available devices and exit", ""),
    ("-t, --threads", "N", "number of CPU threads", "LLAMA_ARG_THREADS"),
    ("-c, --ctx-size", "N", "size of the prompt context", "LLAMA_ARG_CTX_SIZE"),
    ("-b, --batch-size", "N", "logical maximum batch size", "LLAMA_ARG_BATCH"),
    ("-ub, --ubatch-size", "N", "physical maximum batch size", "LLAMA_ARG_UBATCH"),
    ("-fa, --flash-attn", "[on|off|auto]", "set Flash Attention use", "LLAMA_ARG_FLASH_ATTN"),
    ("-ctk, --cache-type-k", "TYPE", "KV cache data type for K", "LLAMA_ARG_CACHE_TYPE_K"),
    ("-ctv, --cache-type-v", "TYPE", "KV cache data type for V", "LLAMA_ARG_CACHE_TYPE_V"),
    ("-dev, --device", "<dev1,dev2,..>", "devices to use for offloading", "LLAMA_ARG_DEVICE"),
    ("-sm, --split-mode", "{none,layer,row}", "how to split the model across GPUs", "LLAMA_ARG_SPLIT_MODE"),
    ("-ts, --tensor-split", "N0,N1,N2,...", "fraction of the model for each GPU", "LLAMA_ARG_TENSOR_SPLIT"),
    ("-mg, --main-gpu", "INDEX", "the GPU to use for the model", "LLAMA_ARG_MAIN_GPU"),
    ("-ngl, --gpu-layers, --n-gpu-layers", "N", "layers to store in VRAM", "LLAMA_ARG_N_GPU_LAYERS"),
    ("-fit, --fit", "[on|off]", "whether to adjust unset arguments", "LLAMA_ARG_FIT"),
    ("-m, --model", "FNAME", "model path to load", "LLAMA_ARG_MODEL"),
    (
        "-ctxcp, --ctx-checkpoints, --swa-checkpoints",
        "N",
        "context checkpoints",
        "LLAMA_ARG_CTX_CHECKPOINTS",
    ),
    ("-cms, --checkpoint-min-step", "N", "spacing of checkpoints", "LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT"),
    ("-cram, --cache-ram", "N", "maximum cache size in MiB", "LLAMA_ARG_CACHE_RAM"),
    ("-kvu, --kv-unified, -no-kvu, --no-kv-unified", "", "single unified KV buffer", "LLAMA_ARG_KV_UNIFIED"),
    ("--kv-unified-per-slot", "N", "context limit per slot", "LLAMA_ARG_KV_UNIFIED_PER_SLOT"),
    ("--swa-full", "", "use full-size SWA cache", "LLAMA_ARG_SWA_FULL"),
    ("--rope-scaling", "{none,linear,yarn}", "RoPE frequency scaling method", "LLAMA_ARG_ROPE_SCALING_TYPE"),
    ("--rope-scale", "FACTOR", "RoPE context scaling factor", "LLAMA_ARG_ROPE_SCALE"),
    ("--yarn-orig-ctx", "N", "YaRN: original context size of model", "LLAMA_ARG_YARN_ORIG_CTX"),
    ("-kvo, --kv-offload, -nkvo, --no-kv-offload", "", "KV cache offloading", "LLAMA_ARG_KV_OFFLOAD"),
    ("-ncmoe, --n-cpu-moe", "N", "keep the experts of the first N layers in the CPU", "LLAMA_ARG_N_CPU_MOE"),
    ("-mm, --mmproj", "FILE", "path to a multimodal projector file", "LLAMA_ARG_MMPROJ"),
    ("--mmproj-auto, --no-mmproj, --no-mmproj-auto", "", "look for a projector", "LLAMA_ARG_MMPROJ_AUTO"),
    ("--mmproj-offload, --no-mmproj-offload", "", "projector on the card", "LLAMA_ARG_MMPROJ_OFFLOAD"),
    ("--image-max-tokens", "N", "maximum tokens of an image", "LLAMA_ARG_IMAGE_MAX_TOKENS"),
    (
        "--spec-type",
        "none,draft-simple,draft-eagle3,draft-mtp,draft-dflash,draft-dspark",
        "types of speculative decoding",
        "LLAMA_ARG_SPEC_TYPE",
    ),
    ("--spec-draft-n-max", "N", "tokens to draft", "LLAMA_ARG_SPEC_DRAFT_N_MAX"),
    (
        "--spec-draft-type-k, -ctkd, --cache-type-k-draft",
        "TYPE",
        "KV cache data type for K for the draft model",
        "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K",
    ),
    (
        "--spec-draft-type-v, -ctvd, --cache-type-v-draft",
        "TYPE",
        "KV cache data type for V for the draft model",
        "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V",
    ),
    ("--spec-draft-model, -md, --model-draft", "FNAME", "draft model", "LLAMA_ARG_SPEC_DRAFT_MODEL"),
    (
        "--spec-draft-ngl, -ngld, --gpu-layers-draft, --n-gpu-layers-draft",
        "N",
        "draft model layers to store in VRAM",
        "LLAMA_ARG_N_GPU_LAYERS_DRAFT",
    ),
    ("-np, --parallel", "N", "number of server slots", "LLAMA_ARG_N_PARALLEL"),
    ("-a, --alias", "STRING", "set model name aliases, comma-separated", "LLAMA_ARG_ALIAS"),
    ("--host", "HOST", "address to listen on, or UNIX socket path ending in .sock", "LLAMA_ARG_HOST"),
    ("--port", "PORT", "port to listen", "LLAMA_ARG_PORT"),
    ("--ui, --webui, --no-ui, --no-webui", "", "whether to enable the Web UI", "LLAMA_ARG_UI"),
    ("--metrics", "", "enable prometheus compatible metrics endpoint", "LLAMA_ARG_ENDPOINT_METRICS"),
    ("--embedding, --embeddings", "", "restrict to only support embedding use case", "LLAMA_ARG_EMBEDDINGS"),
    ("--pooling", "{none,mean,cls,last,rank}", "pooling type for embeddings", "LLAMA_ARG_POOLING"),
    ("--rerank, --reranking", "", "enable reranking endpoint on server", "LLAMA_ARG_RERANKING"),
    ("--slots, --no-slots", "", "expose slots monitoring endpoint", "LLAMA_ARG_ENDPOINT_SLOTS"),
    ("--jinja, --no-jinja", "", "whether to use jinja template engine for chat", "LLAMA_ARG_JINJA"),
)


def install_fake_engine(directory: Path, **behaviour: Any) -> Path:
    """Put a fake llama-server and its behaviour into ``directory``; the result serves as LLLM3090_LLAMA_DIR.

    Args:
        directory: made if missing.
        behaviour: fields of :class:`Behaviour`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    server = directory / "llama-server"
    # Beside and renamed: a running copy keeps its file, and nobody sees half of a new one.
    fresh = directory / ".llama-server.new"
    fresh.write_text(
        f"#!{sys.executable} -IS\n" + Path(__file__).read_text(encoding="utf-8"), encoding="utf-8"
    )
    fresh.chmod(0o755)
    fresh.rename(server)
    set_behaviour(directory, **behaviour)
    return directory


def set_behaviour(directory: Path, **behaviour: Any) -> None:
    """Replace the behaviour of an installed engine; a running one takes over what concerns requests."""
    text = json.dumps(dataclasses.asdict(Behaviour(**behaviour)))
    fresh = directory / f".{BEHAVIOUR_FILE}.new"
    fresh.write_text(text, encoding="utf-8")
    fresh.rename(directory / BEHAVIOUR_FILE)


@contextlib.contextmanager
def edited_state(path: Path) -> Iterator[list[str]]:
    """The lines of a fake card's state file, for change; written back at once and as a whole."""
    with Path(f"{path}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = path.read_text(encoding="utf-8").splitlines()
        yield lines
        fresh = Path(f"{path}.new")
        fresh.write_text("\n".join(lines) + "\n", encoding="utf-8")
        fresh.rename(path)


def cards_of(lines: list[str]) -> list[str]:
    """UUIDs of the cards of a state file, in its order."""
    return [line.split()[1] for line in lines if line.split()[:1] == ["uuid"]]


def free_bytes(lines: list[str], index: int = 0) -> int:
    """Bytes free on a card of a state file, by default the first, by the library's own rule."""
    free, devices = 0, -1
    for line in lines:
        key, *values = line.split() or [""]
        devices += key == "device"
        if devices != index:
            continue
        if key == "total":
            free += int(values[0])
        elif key in ("reserved", "other"):
            free -= int(values[0])
        elif key == "process" and values[2] != "na" and (values[3:4] != ["alive"] or _runs(values[1])):
            free -= int(values[2])
    return free


def _runs(pid: str) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
        )
    except FileNotFoundError:
        return False


def load_behaviour() -> Behaviour:
    """The behaviour of this executable."""
    named = os.environ.get("FAKE_ENGINE_BEHAVIOUR")
    path = Path(named) if named else Path(__file__).resolve().parent / BEHAVIOUR_FILE
    try:
        return Behaviour(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Behaviour()


def wait_while(holds: Callable[[Behaviour], bool]) -> None:
    """Until the behaviour says otherwise; a behaviour is a file, so it is looked at."""
    while holds(load_behaviour()):
        time.sleep(0.01)


def help_text(behaviour: Behaviour) -> str:
    """``--help`` in the layout of the real one: descriptions at column 40, or below a long option."""
    lines = ["----- common params -----", ""]
    for spellings, value, description, variable in OPTIONS:
        names = [name for name in spellings.split(", ") if name not in behaviour.missing_flags]
        if not names:
            continue
        left = f"{', '.join(names)} {value}".rstrip()
        lines += [f"{left:<39} {description}"] if len(left) < 39 else [left, " " * 40 + description]
        if variable:
            lines.append(" " * 40 + f"(env: {variable})")
    return "\n".join(lines)


def vulkan_indices(count: int) -> list[int]:
    """Those of ``count`` Vulkan devices that are visible, in order; none where one of them is not there."""
    shown = os.environ.get("GGML_VK_VISIBLE_DEVICES")
    if shown is None:
        return list(range(count))
    indices = [int(word) for word in shown.replace(",", " ").split()]
    return indices if all(index < count for index in indices) else []


def listed_devices(behaviour: Behaviour) -> tuple[str, ...]:
    """What ``--list-devices`` says; Vulkan devices are numbered as they are visible."""
    lines = behaviour.devices
    if not all(line.startswith("Vulkan") for line in lines):
        return lines
    rest = [lines[index].partition(":")[2] for index in vulkan_indices(len(lines))]
    return tuple(f"Vulkan{number}:{text}" for number, text in enumerate(rest))


PROMPT_TOKENS_PER_S = 100_000
TOKENS_PER_S = 100


@dataclass
class Work:
    """A request; without a slot it waits for one."""

    task: int
    prompt_tokens: int
    computed_tokens: int = 0
    generated_tokens: int = 0
    slot: int | None = None


class UsageError(Exception):
    """The command line is wrong."""


def parse(argv: list[str], behaviour: Behaviour) -> dict[str, str]:
    """Arguments by the last spelling of their option, then the variables that fill what is missing."""
    by_name: dict[str, tuple[str, str]] = {}
    values: dict[str, str] = {}
    for spellings, value, _, variable in OPTIONS:
        names = spellings.split(", ")
        by_name.update({name: (names[-1], value) for name in names if name not in behaviour.missing_flags})
        if variable in os.environ:
            values[names[-1]] = os.environ[variable]
    rest = iter(argv)
    for argument in rest:
        if argument not in by_name:
            raise UsageError(f"error: invalid argument: {argument}")
        name, wants = by_name[argument]
        given = next(rest, None) if wants else argument
        if given is None:
            raise UsageError(f'error while handling argument "{argument}": expected value for argument')
        if wants in ("N", "PORT") and not given.lstrip("-").isdigit():
            raise UsageError(f'error while handling argument "{argument}": stoi')
        values[name] = given
    return values


def say(text: str) -> None:
    """A log line."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201  # its log is its standard error


class Engine:
    """The running server: loads, then answers."""

    def __init__(self, arguments: dict[str, str], behaviour: Behaviour) -> None:
        self.arguments = arguments
        self.behaviour = behaviour
        self.ready = threading.Event()
        self.sent_tokens = 0
        self.prompt_tokens = 0
        self.metrics_seen_tokens = 0  # of both kinds, when /metrics was asked last
        self.works: list[Work] = []
        self.tasks = 0
        self.lock = threading.Lock()
        self._ballast: list[bytearray] = []
        self._prompted = False
        state = behaviour.nvml_state or os.environ.get("FAKE_NVML_STATE")
        self._state = Path(state) if state else None

    @property
    def model(self) -> str:
        return self.arguments["--model"]

    @property
    def alias(self) -> str:
        return self.arguments.get("--alias", self.model).split(",")[0]

    @property
    def slots(self) -> int:
        return int(self.arguments.get("--parallel", "1"))

    def begin(self, prompt_tokens: int) -> Work:
        """Take a request."""
        with self.lock:
            self.tasks += 1
            work = Work(self.tasks, prompt_tokens)
            self.works.append(work)
            self.prompt_tokens += prompt_tokens
            self._give_slots()
        return work

    def end(self, work: Work) -> None:
        """It is answered."""
        with self.lock:
            self.works.remove(work)
            self._give_slots()

    def _give_slots(self) -> None:
        free = sorted(set(range(self.slots)) - {each.slot for each in self.works})
        waiting = [each for each in self.works if each.slot is None]
        for number, work in zip(free, waiting, strict=False):
            work.slot = number

    @property
    def vram_mib(self) -> int:
        return self.behaviour.vram_mib_of.get(self.alias, self.behaviour.vram_mib)

    def load(self) -> None:
        """Claim memory in steps, or fail as demanded."""
        say(f"srv    load_model: loading model '{self.model}'")
        with Path(self.model).open("rb") as file:
            if file.read(4) != b"GGUF":
                self._give_up(f"gguf_init_from_file: failed to read magic of '{self.model}'")
        steps = max(1, self.behaviour.steps)
        for step in range(1, steps + 1):
            time.sleep(self.behaviour.load_s / steps)
            if self.behaviour.step_reads_kib:
                with Path(self.model).open("rb", buffering=0) as file:
                    file.read(self.behaviour.step_reads_kib * 1024)
            if 2 * step > steps:
                self._fail_if_demanded()
            if step == steps:
                wait_while(lambda now: now.load_held)
            self._claim(step, steps)
        say("srv  llama_server: model loaded")
        say(f"srv  llama_server: listening on unix://{self.arguments['--host']}")
        self.ready.set()

    def _fail_if_demanded(self) -> None:
        if self.behaviour.oom:
            self._out_of_memory(self.vram_mib * MIB or 9216 * MIB)
        crash = self.behaviour.crash_during_load
        if crash is not None:
            for line in crash.get("lines", []):
                say(line)
            die(crash)

    def _claim(self, step: int, steps: int) -> None:
        share = self.behaviour.host_mib * MIB // steps
        if share:
            self._ballast.append(bytearray(os.urandom(4096)) * (share // 4096))
        if self._state is None or self.vram_mib == 0:
            return
        self._hold(self._state, self.vram_mib * MIB * step // steps)

    def claim_for_prompts(self) -> None:
        """Claim what comes with the first completion; afterwards nothing."""
        with self.lock:
            first, self._prompted = not self._prompted, True
        if first and self._state is not None and self.behaviour.prompt_vram_mib:
            try:
                self._hold(self._state, (self.vram_mib + self.behaviour.prompt_vram_mib) * MIB)
            except SystemExit:
                die({"signal": "SIGABRT"})  # out of memory while it computes ends the real one so

    def cards(self, lines: list[str]) -> dict[int, int]:
        """Places in the state file of the cards that it computes on, and the share of the model on each.

        As a CUDA build has it: of the cards that CUDA_VISIBLE_DEVICES names, in its order, those of ``--device`` with
        the shares of ``--tensor-split``; without either all that are visible, in equal shares. A Vulkan build takes
        indices of its loader instead.
        """
        uuids, shown = cards_of(lines), os.environ.get("CUDA_VISIBLE_DEVICES")
        if self.behaviour.vulkan_cards:
            places = self.behaviour.vulkan_cards
            visible = [places[index] for index in vulkan_indices(len(places))]
        elif shown is None:
            visible = list(range(len(uuids)))
        else:
            visible = [uuids.index(each) for each in shown.split(",")]
        named = self.arguments.get("--device")
        if named == "none":
            return {}
        numbers = [re.sub(r"[A-Za-z]+", "", name) for name in named.split(",")] if named else []
        used = [visible[int(number)] for number in numbers] if numbers else visible
        shares = [int(share) for share in self.arguments.get("--tensor-split", "").split(",") if share]
        return dict(zip(used, shares or [1] * len(used), strict=True))

    def _hold(self, state: Path, wanted: int) -> None:
        hold_ms = int(self.behaviour.hold_after_exit_s * 1000)
        with edited_state(state) as lines:
            self._forget(lines)
            cards = self.cards(lines)
            sizes = {card: wanted * share // sum(cards.values()) for card, share in cards.items()}
            fits = all(size <= free_bytes(lines, card) for card, size in sizes.items())
            if fits:
                places = [number for number, line in enumerate(lines) if line.split() == ["device"]]
                for card in sorted(sizes, reverse=True):
                    lines.insert(places[card] + 1, f"process c {os.getpid()} {sizes[card]} alive {hold_ms}")
        if not fits:
            self._out_of_memory(wanted)

    @staticmethod
    def _forget(lines: list[str]) -> None:
        own = str(os.getpid())
        lines[:] = [line for line in lines if line.split()[:1] != ["process"] or line.split()[2] != own]

    def release(self) -> None:
        """Give the card's memory back, as the driver does at the end of a process."""
        if self._state is not None and self.vram_mib and not self.behaviour.hold_after_exit_s:
            with edited_state(self._state) as lines:
                self._forget(lines)

    def _out_of_memory(self, wanted: int) -> None:
        say(
            "E ggml_backend_cuda_buffer_type_alloc_buffer: allocating "
            f"{wanted / MIB:.2f} MiB on device 0: cudaMalloc failed: out of memory"
        )
        say(f"E alloc_tensor_range: failed to allocate CUDA0 buffer of size {wanted}")
        self._give_up("unable to allocate CUDA0 buffer")

    def _give_up(self, why: str) -> None:
        say(f"E llama_model_load: error loading model: {why}")
        say("E llama_model_load_from_file_impl: failed to load model")
        say(f"E srv    load_model: failed to load model, '{self.model}'")
        self.release()
        raise SystemExit(1)


def die(how: dict[str, Any]) -> None:
    """End at once, by signal or exit status."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if "signal" in how:
        os.kill(os.getpid(), signal.Signals[how["signal"]])
        signal.pause()  # delivered to another thread
    sys.stderr.flush()
    os._exit(int(how.get("exit", 1)))


class Handler(BaseHTTPRequestHandler):
    """The HTTP API."""

    protocol_version = "HTTP/1.1"
    server_version = "llama.cpp"
    engine: ClassVar[Engine]

    def log_message(self, format: str, *args: object) -> None:
        """Quiet, as the real one is about requests at this level."""

    def _json(self, document: Any, status: int = 200) -> None:
        self._send(status, "application/json; charset=utf-8", json.dumps(document).encode())

    def _send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _error(self, status: int, message: str, kind: str) -> None:
        self._json({"error": {"message": message, "type": kind, "code": status}}, status)

    def _loading(self) -> bool:
        if self.engine.ready.is_set():
            return False
        self._error(503, "Loading model", "unavailable_error")
        return True

    def do_GET(self) -> None:
        """Everything but completions."""
        answers: dict[str, Callable[[], Any]] = {
            "/health": lambda: {"status": "ok"},
            "/v1/health": lambda: {"status": "ok"},
            "/props": self._props,
            "/slots": self._slots,
            "/v1/models": self._models,
        }
        answer = answers.get(self.path.partition("?")[0])
        if self.path == "/metrics":
            self._metrics()
        elif answer is None:
            self._error(404, "File Not Found", "not_found_error")
        elif not self._loading():
            self._json(answer())

    def _window(self) -> int:
        arguments = self.engine.arguments
        return int(arguments.get("--ctx-size", "4096")) // int(arguments.get("--parallel", "1"))

    def _props(self) -> Any:
        return {
            "default_generation_settings": {"n_ctx": self._window()},
            "total_slots": int(self.engine.arguments.get("--parallel", "1")),
            "model_alias": self.engine.alias,
            "model_path": self.engine.model,
            "chat_template": "",
        }

    def _slots(self) -> Any:
        """As the real one tells of progress: one that rests has no counters."""
        with self.engine.lock:
            at = {each.slot: each for each in self.engine.works}
            return [self._slot(number, at.get(number)) for number in range(self.engine.slots)]

    def _slot(self, number: int, work: Work | None) -> Any:
        slot = {"id": number, "n_ctx": self._window(), "is_processing": work is not None}
        if work is None:
            return slot
        following = {"has_next_token": True, "n_remain": -1, "n_decoded": work.generated_tokens}
        return slot | {
            "id_task": work.task,
            "n_prompt_tokens": work.computed_tokens + work.generated_tokens,
            "n_prompt_tokens_processed": work.computed_tokens,
            "n_prompt_tokens_cache": 0,
            "next_token": [following],
        }

    def _metrics(self) -> None:
        """As the real one: counters of six digits, averages since the last look."""
        engine = self.engine
        if "--metrics" not in engine.arguments:
            self._error(501, "This server does not support metrics endpoint.", "not_supported_error")
            return
        if self._loading():
            return
        with engine.lock:
            at_work = sum(each.slot is not None for each in engine.works)
            sum_tokens = engine.prompt_tokens + engine.sent_tokens
            values = {
                "prompt_tokens_total": engine.prompt_tokens,
                "prompt_seconds_total": engine.prompt_tokens / PROMPT_TOKENS_PER_S,
                "tokens_predicted_total": engine.sent_tokens,
                "tokens_predicted_seconds_total": engine.sent_tokens / TOKENS_PER_S,
                "predicted_tokens_seconds": 100 if sum_tokens > engine.metrics_seen_tokens else 0,
                "requests_processing": at_work,
                "requests_deferred": len(engine.works) - at_work,
            }
            engine.metrics_seen_tokens = sum_tokens
        text = "".join(
            f"# HELP llamacpp:{name} {name}\n# TYPE llamacpp:{name} gauge\nllamacpp:{name} {value:g}\n"
            for name, value in values.items()
        )
        self._send(200, "text/plain; version=0.0.4", text.encode())

    def _models(self) -> Any:
        entry = {"id": self.engine.alias, "object": "model", "created": 0, "owned_by": "llamacpp"}
        return {"object": "list", "data": [entry]}

    def do_POST(self) -> None:
        """Chat completions, streamed or whole."""
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if self.path not in {"/v1/chat/completions", "/completion", "/tokenize", *VECTORS, *SCORES}:
            self._error(404, "File Not Found", "not_found_error")
            return
        if self._loading():
            return
        try:
            request = json.loads(body)
            streamed = bool(request.get("stream", False))
            if self.path == "/tokenize":
                self._json({"tokens": [sum(word.encode()) for word in request["content"].split()]})
                return
        except (ValueError, AttributeError) as error:
            self._error(400, f"parse error: {error}", "invalid_request_error")
            return
        work = self.engine.begin(max(1, len(body.split())))
        try:
            self.engine.claim_for_prompts()
            if self.path in VECTORS or self.path in SCORES:
                self._compute(request)
            elif self.path == "/completion":
                self._complete_plain(request)
            else:
                self._complete(streamed, work)
        finally:
            self.engine.end(work)

    def _compute(self, request: Any) -> None:
        """Vectors or scores, where it was started for these; any other purpose is refused as the real one does."""
        wait_while(lambda now: now.held)
        vectors = self.path in VECTORS
        if ("--embeddings" if vectors else "--reranking") not in self.engine.arguments:
            what = "embeddings" if vectors else "reranking"
            self._error(501, f"This server does not support {what}.", "not_supported_error")
        elif vectors:
            texts = request.get("input", request.get("content"))
            many = (
                texts
                if isinstance(texts, list) and all(isinstance(text, str) for text in texts)
                else [texts]
            )
            data = [
                {"object": "embedding", "index": at, "embedding": [float(at), 0.5]}
                for at in range(len(many))
            ]
            self._json({"object": "list", "model": self.engine.alias, "data": data})
        else:
            results = [
                {"index": at, "relevance_score": -float(at)} for at in range(len(request["documents"]))
            ]
            self._json({"object": "list", "model": self.engine.alias, "results": results})

    def _complete_plain(self, request: Any) -> None:
        """Of a prompt of tokens, whole; what a slot cannot hold is refused as the real one does."""
        if load_behaviour().hang:
            threading.Event().wait()
        wait_while(lambda now: now.held)
        count = len(request["prompt"])
        if count >= self._window():
            self._error(400, "the request exceeds the available context size", "exceed_context_size_error")
            return
        self._json({"content": "Hello", "tokens_evaluated": count, "id_slot": request.get("id_slot", 0)})

    def _complete(self, streamed: bool, work: Work) -> None:
        behaviour = load_behaviour()
        if streamed:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self._event({"delta": {"role": "assistant", "content": None}, "finish_reason": None})
        if behaviour.hang:
            threading.Event().wait()
        for _ in range(behaviour.prompt_steps):
            time.sleep(behaviour.prompt_step_s)
            work.computed_tokens += int(self.engine.arguments.get("--batch-size", "2048"))
        wait_while(lambda now: now.held)
        for token in behaviour.tokens:
            time.sleep(behaviour.token_s)
            work.generated_tokens += 1
            if streamed:
                self._event({"delta": {"content": token}, "finish_reason": None})
            self._count(behaviour)
        if not streamed:
            message = {"role": "assistant", "content": "".join(behaviour.tokens)}
            choice = {"index": 0, "finish_reason": "stop", "message": message}
            self._json({"object": "chat.completion", "model": self.engine.alias, "choices": [choice]})
            return
        self._event({"delta": {}, "finish_reason": "stop"}, predicted_n=len(behaviour.tokens))
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _count(self, behaviour: Behaviour) -> None:
        with self.engine.lock:
            self.engine.sent_tokens += 1
            sent = self.engine.sent_tokens
        if behaviour.crash_after_tokens is not None and sent >= behaviour.crash_after_tokens:
            say("E CUDA error: an illegal memory access was encountered")
            die({"signal": "SIGABRT"})

    def _event(self, choice: dict[str, Any], predicted_n: int | None = None) -> None:
        document: dict[str, Any] = {
            "object": "chat.completion.chunk",
            "model": self.engine.alias,
            "choices": [{"index": 0, **choice}],
        }
        if predicted_n is not None:
            document["timings"] = {"predicted_n": predicted_n, "predicted_per_second": 100.0}
        self._chunk(b"data: " + json.dumps(document).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """One thread a connection, all of them ending with the process."""

    daemon_threads = True
    request_queue_size = 64

    def get_request(self) -> tuple[Any, Any]:
        """A Unix client has no address; the handler wants one."""
        request, _ = super().get_request()
        return request, ("unix", 0)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that left is nobody's error."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def serve(arguments: dict[str, str], behaviour: Behaviour) -> None:
    """Listen, load, answer until told to end."""
    for name in ("--model", "--host"):
        if name not in arguments:
            raise UsageError(f"error: {name} is missing")
    if not arguments["--host"].endswith(".sock"):
        raise UsageError("error: this fake listens on Unix sockets only")
    engine = Engine(arguments, behaviour)
    Handler.engine = engine

    def end(_number: int, _frame: object) -> None:
        say("srv    operator(): operator(): cleaning up before exit...")
        raise SystemExit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour.ignore_sigterm else end)
    signal.signal(signal.SIGINT, end)
    try:
        server = Server(arguments["--host"], Handler)
    except OSError:  # also where a killed predecessor left its socket, as with the real one
        say(
            f"E srv         start: couldn't bind HTTP server socket, hostname: {arguments['--host']}, port: 8080"
        )
        raise SystemExit(1) from None
    try:
        with server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            engine.load()
            while True:
                signal.pause()
    finally:
        engine.release()


def main(argv: list[str]) -> int:
    """The command line."""
    behaviour = load_behaviour()
    try:
        arguments = parse(argv, behaviour)
        if "--usage" in arguments:
            print(help_text(behaviour))  # noqa: T201  # as the real one
        elif "--version" in arguments:
            say(behaviour.version)
        elif "--list-devices" in arguments:
            lines = listed_devices(behaviour) or ("(none)",)
            print("Available devices:", *(f"  {line}" for line in lines), sep="\n")  # noqa: T201  # as the real one
        else:
            serve(arguments, behaviour)
    except UsageError as error:
        say(str(error))
        return 1
    except FileNotFoundError as error:
        say(f"gguf_init_from_file: failed to open GGUF file '{error.filename}' ({error.strerror})")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
