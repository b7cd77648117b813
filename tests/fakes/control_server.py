"""Stand-ins for the daemon's control API on a real Unix socket, to test the client against the contract.

:class:`ControlServer` speaks canned answers built from the wire models and checks each request against them.
:class:`RawServer` says exactly the bytes it is given, for everything that is not an answer of our daemon.
"""

from __future__ import annotations

import enum
import http.server
import json
import os
import queue
import re
import socketserver
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

from click.testing import CliRunner, Result
from pydantic import BaseModel, ValidationError

from lllm3090ctl.cli import cli
from lllm3090d import wire
from lllm3090d.errors import ErrorCode, LlmError

WAIT_S = 60.0


class Cut(enum.Enum):
    """What ends a scripted stream early."""

    CONNECTION = "connection"  # the daemon is gone in the middle of a stream


Step = BaseModel | threading.Event | Cut | bytes


class Stream(tuple[Step, ...]):
    """A chunked NDJSON answer. An event holds it until it is set; a leading event holds the head as well."""

    __slots__ = ()


Script = BaseModel | LlmError | Stream
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Seen:
    """A request as it arrived."""

    method: str
    target: str
    body: BaseModel | None


ROUTES: Mapping[tuple[str, str], type[BaseModel] | None] = {
    ("GET", r"/v1/(version|status|models|names|instances|gpus|autoload|keys)"): None,
    ("GET", r"/v1/models/[^/]+/(explain|history)"): None,
    ("GET", r"/v1/instances/[^/]+/logs"): None,
    ("GET", r"/v1/(events|requests)"): None,
    ("GET", r"/v1/engines(/[^/]+)?"): None,
    ("POST", r"/v1/engines/select"): wire.SelectEngineBody,
    ("POST", r"/v1/inspect"): wire.InspectBody,
    ("POST", r"/v1/plan"): wire.PlanBody,
    ("POST", r"/v1/load"): wire.LoadBody,
    ("POST", r"/v1/unload"): wire.UnloadBody,
    ("POST", r"/v1/release"): wire.ReleaseBody,
    ("POST", r"/v1/resume"): wire.ResumeBody,
    ("POST", r"/v1/models/[^/]+/pin"): wire.PinBody,
    ("POST", r"/v1/models/[^/]+/reset"): wire.ResetBody,
    ("POST", r"/v1/models/[^/]+/autoload"): wire.AutoloadBody,
    ("POST", r"/v1/keys/(add|remove)"): wire.KeyBody,
    ("POST", r"/v1/cancel"): wire.CancelBody,
}
QUERIES = {
    "/logs": {"lines", "follow"},
    "/v1/events": {"since", "follow"},
    "/v1/requests": {"last", "follow"},
}
OPTIONAL_QUERIES = {
    "/v1/models": {"catalogue"},
    "/v1/names": {"of"},
    "/v1/events": {"last"},
    "/v1/requests": {"model", "since"},
    "/logs": {"since"},
    "/history": {"runs"},
}


class _UnixServer(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: Path, handler: type[socketserver.BaseRequestHandler]) -> None:
        super().__init__(str(path), handler)
        self.errors: list[BaseException] = []

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that goes away is part of the tests; anything else fails them."""
        error = sys.exception()
        if error is not None and not isinstance(error, BrokenPipeError | ConnectionResetError):
            self.errors.append(error)


class _Server:
    """A server on a socket in a short directory of its own, for the time of a ``with``."""

    def __init__(self, handler: type[socketserver.BaseRequestHandler]) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ctl")
        self.path = Path(self._directory.name) / "control.sock"
        self.server = _UnixServer(self.path, handler)
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.server.shutdown()
        self._thread.join(WAIT_S)
        self.server.server_close()
        self._directory.cleanup()
        if kind is None:
            assert self.server.errors == []


class ControlServer(_Server):
    """Answers each path with its script; the last script of a path repeats."""

    def __init__(self, **scripts: Script | list[Script]) -> None:
        """Scripts by the last word of the path: ``status=...``, ``load=...``, ``logs=...``."""

        class Handler(_ControlHandler):
            seen: queue.Queue[Seen] = queue.Queue()

        Handler.scripts = {
            word: script if isinstance(script, list) else [script] for word, script in scripts.items()
        }
        super().__init__(Handler)
        self.seen = Handler.seen

    def next_request(self) -> Seen:
        """The next request, once it has arrived."""
        return self.seen.get(timeout=WAIT_S)


class _ControlHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seen: queue.Queue[Seen]
    scripts: dict[str, list[Script]]

    def log_message(self, format: str, *args: object) -> None:
        """Keep quiet."""

    def do_GET(self) -> None:
        """Any GET."""
        self._handle()

    def do_POST(self) -> None:
        """Any POST."""
        self._handle()

    def _handle(self) -> None:
        self.close_connection = True
        try:
            body = self._checked_body()
        except LlmError as error:
            self._problem(error)
            return
        self.seen.put(Seen(self.command, self.path, body))
        word = urlsplit(self.path).path.rsplit("/", 1)[-1]
        if self.command == "GET" and "/engines/" in self.path:
            word = "engine"  # whichever
        left = self.scripts[word]
        script = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(script, LlmError):
            self._problem(script)
        elif isinstance(script, BaseModel):
            self._whole(200, "application/json", script.model_dump_json().encode())
        else:
            self._stream(script)

    def _checked_body(self) -> BaseModel | None:
        parts = urlsplit(self.path)
        models = [
            model
            for (method, pattern), model in ROUTES.items()
            if method == self.command and re.fullmatch(pattern, parts.path)
        ]
        if not models:
            raise LlmError(ErrorCode.NO_SUCH_ROUTE, f"no route {self.command} {self.path}")
        wanted = next((keys for end, keys in QUERIES.items() if parts.path.endswith(end)), set())
        optional = next((keys for end, keys in OPTIONAL_QUERIES.items() if parts.path.endswith(end)), set())
        if not wanted <= set(parse_qs(parts.query)) <= wanted | optional:
            raise LlmError(ErrorCode.INVALID_REQUEST, f"query {parts.query!r}, expected {sorted(wanted)}")
        if models[0] is None:
            return None
        try:
            return models[0].model_validate_json(self.rfile.read(int(self.headers["Content-Length"])))
        except ValidationError as error:
            raise LlmError(ErrorCode.INVALID_REQUEST, str(error)) from error

    def _problem(self, error: LlmError) -> None:
        document = json.dumps(error.problem()).encode()
        self._whole(error.kind.http_status, "application/problem+json", document)

    def _whole(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, steps: Stream) -> None:
        begun = False
        for step in steps:
            if isinstance(step, threading.Event):
                assert step.wait(WAIT_S), "nobody released the stream"
                continue
            if not begun:
                begun = True
                self.send_response(200)
                self.send_header("Content-Type", "application/x-ndjson")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
            if isinstance(step, Cut):
                return
            line = step if isinstance(step, bytes) else step.model_dump_json().encode() + b"\n"
            self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")


class RawServer(_Server):
    """Reads a request, says the bytes, holds the connection until the event is set, hangs up."""

    def __init__(self, answer: bytes, hold: threading.Event | None = None) -> None:
        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                length = 0
                while (line := self.rfile.readline()).strip():
                    name, _, value = line.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                self.rfile.read(length)
                self.wfile.write(answer)
                if hold is not None:
                    hold.wait(WAIT_S)

        super().__init__(Handler)


def ctl(server: _Server | Path, *arguments: str, env: Mapping[str, str] | None = None) -> Result:
    """Run a command line in this process."""
    path = server.path if isinstance(server, _Server) else server
    return CliRunner().invoke(cli, ["--socket", str(path), *arguments], env=env)


def spawn_ctl(server: _Server, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """Start a command line as a process of its own; its output goes to text pipes unless told otherwise."""
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | options
    # Buffered as for anybody else, or tests of flushing could not fail.
    environment = dict(os.environ) | {"PYTHONUNBUFFERED": ""} | options.pop("env", {})
    return subprocess.Popen(
        # A background job of a shell ignores SIGINT and hands that down; these processes are to feel it.
        [
            "env",
            "--default-signal=INT",
            sys.executable,
            "-m",
            "lllm3090ctl",
            "--socket",
            str(server.path),
            *arguments,
        ],
        env=environment,
        **options,
    )


def name_in_target(target: str) -> str:
    """The model's name in the path of a request for logs."""
    return unquote(urlsplit(target).path.split("/")[3])


def changed(model: M, /, **changes: Any) -> M:
    """A copy with other values, validated again."""
    return type(model).model_validate(model.model_dump() | changes)


MIB = 1 << 20
INSTANCE = wire.InstanceView.model_validate(
    {
        "name": "SmolLM2-135M",
        "run": "k3f9",
        "state": "ready",
        "since": "2026-11-30T11:20:00Z",
        "unit": "lllm3090-SmolLM2-135M-k3f9.service",
        "invocation_id": "0123456789abcdef0123456789abcdef",
        "main_pid": 4711,
        "endpoint": "/run/user/1000/lllm3090d/engines/k3f9.sock",
        "path": "/home/x/models/SmolLM2-135M/model.gguf",
        "context_tokens": 8192,
        "parallel": 2,
        "window_tokens": 4096,
        "cache_type_k": "q8_0",
        "cache_type_v": "q8_0",
        "reserved_bytes": 512 * MIB,
        "measured_bytes": 498 * MIB,
        "engine_version": "version: 9870 (abc)",
        "adopted": False,
    }
)
PLAN = wire.PlanView.model_validate(
    {
        "model": "SmolLM2-135M",
        "path": "/home/x/models/SmolLM2-135M/model.gguf",
        "architecture": "llama",
        "quantisation": "Q4_K_M",
        "context_tokens": 8192,
        "parallel": 2,
        "window_tokens": 4096,
        "trained_context_tokens": 8192,
        "cache_type_k": "q8_0",
        "cache_type_v": "f16",
        "capped_by": "model",
        "fits": True,
        "card_kind": "nvidia",
        "items": [
            {
                "name": "weights",
                "place": "card",
                "bytes": 100 * MIB,
                "evidence": "header",
                "formula": "272 tensors",
            },
            {
                "name": "kv cache",
                "place": "card",
                "bytes": 412 * MIB,
                "evidence": "header",
                "formula": "30 layers [x] 8192",
            },
            {
                "name": "prompts",
                "place": "host",
                "bytes": 1024 * MIB,
                "evidence": "header",
                "formula": "--cache-ram 1024",
            },
        ],
        "card_bytes": 512 * MIB,
        "host_bytes": 1024 * MIB,
        "budget": [
            {"name": "total", "bytes": 24576 * MIB, "origin": "NVML"},
            {"name": "driver", "bytes": -451 * MIB, "origin": "NVML, live"},
        ],
        "available_bytes": 24125 * MIB,
        "argv": ["/opt/llama/llama-server", "-m", "/home/x/my models/a;b.gguf", "-c", "8192"],
        "verdict": "tight",
        "evidence": "header",
        "limit": {"by": "model", "line": None, "text": "the model: it is trained for 8,192 tokens"},
        "notes": ["2 slots, as no number was asked for"],
        "agent": {"ready": False, "concurrent_subagents": 1, "remarks": ["The window is too small."]},
        "batch_tokens": 2048,
        "micro_batch_tokens": 512,
        "unified": False,
        "swa_full": False,
        "placement": {"layers_on_card": 20, "expert_layers_on_host": 0, "cache_on_host": False},
        "draft": {
            "spec_type": "draft-mtp",
            "tokens": 3,
            "cache_type_k": "q8_0",
            "cache_type_v": "f16",
            "window_tokens": 0,
        },
        "projector": "host",
        "rope": {"scaling": "yarn", "factor": 2.5, "original_tokens": 8192, "window_tokens": 20480},
        "tier": {
            "card_tokens": 4096,
            "host_bytes": 64 * MIB,
            "tail_draft_tokens": 0,
            "end_tokens_per_s": 11.44,
            "half_tokens_per_s": 19.5,
            "speed": "Speed predicted from a step; bus 23.7 GB/s, measured on PCIe 4.0 x16.",
            "ways": [
                {
                    "way": "tier",
                    "fits": True,
                    "cache_type": "q8_0",
                    "context_tokens": 8192,
                    "card_tokens": 4096,
                    "card_bytes": 512 * MIB,
                    "host_bytes": 64 * MIB,
                    "end_tokens_per_s": 11.44,
                    "half_tokens_per_s": 19.5,
                    "speed": "Speed predicted from a step.",
                    "reasons": ["It takes 512 MiB."],
                },
                {
                    "way": "q4_0",
                    "fits": False,
                    "cache_type": "q4_0",
                    "context_tokens": 8192,
                    "card_tokens": 0,
                    "card_bytes": None,
                    "host_bytes": None,
                    "end_tokens_per_s": None,
                    "half_tokens_per_s": None,
                    "speed": None,
                    "reasons": ["No."],
                },
            ],
        },
        "card": {
            "id": "rtx-3090",
            "name": "NVIDIA GeForce RTX 3090",
            "total_bytes": 24576 * MIB,
            "compute_capability": "8.6",
            "backend": "cuda",
            "present": True,
            "empty": False,
            "desktop": True,
        },
        "alternatives": [
            {
                "ask": "--parallel 1",
                "window_tokens": 8192,
                "parallel": 1,
                "card_bytes": 500 * MIB,
                "gain": "4,096 tokens of window more, 1 slot instead of 2",
            }
        ],
        "smallest_card": {
            "gib": 12,
            "total_bytes": 11900 * MIB,
            "window_tokens": 40960,
            "evidence": "header",
        },
        "speed": {
            "tokens_per_s": 54.8,
            "qualifier": "other card",
            "card": "rtx-4090",
            "backend": "vulkan",
            "speculation": "mtp",
            "workload": "code",
        },
    }
)
PREVIEWED = wire.PlanView.model_validate(
    PLAN.model_dump()
    | dict.fromkeys(("path", "architecture", "placement", "draft", "rope", "tier", "speed"))
    | {
        "model": "Gemma-4-26B-A4B",
        "quantisation": "Q4_K_S",
        "window_tokens": 65536,
        "projector": "card",
        "argv": (),
        "badges": ("moe", "vision"),
        "verdict": "ok",
        "evidence": "catalogue",
        "agent": {"ready": True, "concurrent_subagents": 1, "remarks": []},
        "card": PLAN.card.model_dump() | {"empty": True, "desktop": None, "present": False}
        if PLAN.card
        else None,
        "download": {
            "id": "gemma-4-26b-a4b",
            "repository": "somebody/Gemma-4-26B-A4B-GGUF",
            "file": "gemma.gguf",
            "file_bytes": 16 << 30,
            "projector_file": "mmproj.gguf",
            "projector_bytes": 1 << 30,
        },
    }
)
STATUS = wire.Status.model_validate(
    {
        "version": "0.1.0",
        "pid": 321,
        "started": "2026-11-30T11:00:00Z",
        "systemd_version": "252",
        "card": {
            "kind": "nvidia",
            "name": "NVIDIA GeForce RTX 3090",
            "uuid": "GPU-1",
            "driver_version": "580.95.05",
            "total_bytes": 24576 * MIB,
            "used_bytes": 700 * MIB,
            "free_bytes": 23425 * MIB,
            "reserved_by_driver_bytes": 451 * MIB,
            "reserved_by_us_bytes": 512 * MIB,
            "available_bytes": 22000 * MIB,
        },
        "engine": {
            "server": "/opt/llama/llama-server",
            "source": "LLLM3090_LLAMA_DIR",
            "locked": True,
            "version": "version: 9870 (abc)",
            "backend": "cuda",
            "devices": ["CUDA0"],
        },
        "models_dir": "/home/x/models",
        "config_file": "/home/x/.config/lllm3090/config.toml",
        "instances": [INSTANCE],
    }
)
_ENGINE = {
    "name": "b11434-cuda-sm86",
    "kind": "compiled",
    "source": "engines_dir",
    "server": "/opt/engines/b11434-cuda-sm86/llama-server",
    "offered": True,
    "next": True,
    "version": "0.6.0-dev (build 11434, commit abc)",
    "tag": "b11434",
    "stale": False,
    "gpu_architecture": "sm86",
    "backend": "cuda",
    "devices": ["CUDA0"],
    "dry_run": True,
    "problem": None,
}
ENGINES = wire.Engines.model_validate(
    {
        "engines": [
            _ENGINE,
            _ENGINE
            | {
                "name": "b10434-cuda-sm86",
                "server": "/opt/engines/b10434-cuda-sm86/llama-server",
                "next": False,
                "tag": "b10434",
                "stale": True,
                "version": "1 (abc)",
            },
            _ENGINE
            | {
                "name": "path",
                "kind": "path",
                "server": "/usr/bin/llama-server",
                "next": False,
                "tag": None,
                "stale": None,
                "version": None,
                "gpu_architecture": None,
                "backend": None,
                "devices": [],
                "dry_run": False,
                "problem": LlmError(ErrorCode.ENGINE_UNUSABLE, "It dies.", hint="Another one.").problem(),
            },
        ],
        "next": "b11434-cuda-sm86",
        "next_problem": None,
        "choice": "b11434-cuda-sm86",
        "choice_problem": None,
        "locked": False,
        "pin": "b11434",
        "running": [
            {
                "model": "SmolLM2-135M",
                "run": "k3f9",
                "server": "/usr/bin/llama-server",
                "version": "1 (old)",
                "is_next": False,
            }
        ],
    }
)
ENGINE = wire.EngineDetails.model_validate(
    {
        "engine": _ENGINE,
        "library_path": ["/opt/engines/b11434-cuda-sm86"],
        "digest": "e1-0123",
        "dry_run_program": "/opt/engines/b11434-cuda-sm86/llama-fit-params",
        "dry_run_flags": ["--fit-print"],
        "options": [
            {
                "names": ["-fa", "--flash-attn"],
                "value": "[on|off|auto]",
                "allowed": ["on", "off", "auto"],
                "default": "auto",
                "variables": ["LLAMA_ARG_FLASH_ATTN"],
            },
            {"names": ["--metrics"], "value": None, "allowed": [], "default": "disabled", "variables": []},
        ],
    }
)
MODELS = wire.Models.model_validate(
    {
        "models_dir": "/home/x/models",
        "models": [
            {
                "name": "SmolLM2-135M",
                "aliases": ["tiny"],
                "path": "/home/x/models/SmolLM2-135M/model.gguf",
                "size_bytes": 100 * MIB,
                "shards": 1,
                "architecture": "llama",
                "quantisation": "Q4_K_M",
                "trained_context_tokens": 8192,
                "state": "ready",
                "kind": "model",
                "badges": ["dense", "vision"],
                "cache_type": "q8_0",
                "kv_bytes_per_token": 12240,
                "window_bytes_per_token": 0,
                "state_bytes_per_slot": 0,
                "projector": "/home/x/models/SmolLM2-135M/mmproj.gguf",
                "drafter": "/home/x/models/mtp-smol.gguf",
                "verdict": "tight",
                "parallel": 2,
                "window_tokens": 4096,
                "evidence": "header",
                "speed": {
                    "tokens_per_s": 210.5,
                    "qualifier": "measured on vulkan",
                    "card": "rtx-3090",
                    "backend": "vulkan",
                    "speculation": "none",
                },
            },
            {
                "name": "page",
                "aliases": [],
                "path": "/home/x/models/page/page.gguf",
                "size_bytes": 3 << 30,
                "shards": 1,
                "architecture": None,
                "quantisation": None,
                "trained_context_tokens": None,
                "problem": LlmError(
                    ErrorCode.BAD_CHECKPOINT, "It is HTML.", hint="Fetch it again."
                ).problem(),
            },
        ],
        "planned_for": {
            "id": "rtx-3090",
            "name": "NVIDIA GeForce RTX 3090",
            "total_bytes": 24576 * MIB,
            "compute_capability": "8.6",
            "backend": "cuda",
            "present": True,
            "empty": True,
            "desktop": True,
        },
    }
)
_LAYER = {
    "kind": "full",
    "keeps_state": False,
    "is_mtp": False,
    "head_count": 24,
    "kv_head_count": 4,
    "key_length": 256,
    "value_length": 256,
    "experts_used": 8,
    "weight_bytes": MIB,
}
_RECURRENT = {**_LAYER, "kind": "recurrent", "keeps_state": True, "kv_head_count": 0}
INSPECTED = wire.InspectView.model_validate(
    {
        "path": "/home/x/models/hybrid/m-00001-of-00002.gguf",
        "name": "hybrid",
        "kind": "model",
        "architecture": "qwen35moe",
        "title": "Hybrid",
        "quantisation": "Q4_1",
        "size_bytes": 41 * MIB,
        "shards": 2,
        "tensor_count": 400,
        "badges": ["moe", "mtp"],
        "trained_context_tokens": 262144,
        "vocabulary_size": 1000,
        "embedding_length": 2048,
        "block_count": 41,
        "expert_count": 256,
        "sliding_window_tokens": 0,
        "layers": [*([_RECURRENT, _RECURRENT, _RECURRENT, _LAYER] * 10), {**_LAYER, "is_mtp": True}],
        "output_tied": True,
        "weights": [
            {"place": "token embedding", "bytes": 3 * MIB},
            {"place": "experts", "bytes": 38 * MIB},
            {"place": "output", "bytes": 0},
        ],
        "weight_bytes": 41 * MIB,
        "context_costs": [
            {"cache_type": "q8_0", "bytes_per_token": 10880, "window_bytes_per_token": 0},
            {"cache_type": "f16", "bytes_per_token": 20480, "window_bytes_per_token": 1024},
        ],
        "state_bytes_per_slot": 63 * MIB,
    }
)
TOO_LARGE = LlmError(
    ErrorCode.INSUFFICIENT_MEMORY,
    "Huge-70B needs 40,000.0 MiB, the card can give 24,125.0 MiB.",
    hint="Unload SmolLM2-135M: lllm3090ctl unload SmolLM2-135M",
    items=[
        {"name": "weights", "place": "card", "bytes": 39000 * MIB, "evidence": "header", "formula": "f"},
        {"name": "kv cache", "place": "card", "bytes": 1000 * MIB + 1, "evidence": "header", "formula": "g"},
        {"name": "prompts", "place": "host", "bytes": 1024 * MIB, "evidence": "header", "formula": "h"},
    ],
    budget=[line.model_dump(mode="json") for line in PLAN.budget],
    available_bytes=24125 * MIB,
)


def load_line(kind: str, elapsed_s: float = 0.5, **members: Any) -> wire.LoadLine:
    """A line of a load's stream."""
    return wire.LoadLine.model_validate(
        {"kind": kind, "elapsed_s": elapsed_s, "token": "a-token-of-test"} | members
    )


ADMITTED = load_line("admitted", 0.1, plan=PLAN)
LOADING = load_line("progress", 0.2, state="loading", resident_bytes=50 * MIB, expected_bytes=512 * MIB)
READY = load_line("ready", 0.9, state="ready", instance=INSTANCE)
REQUEST = wire.RequestView(
    request_id="req_1",
    at="2026-11-30T11:20:01.000Z",
    route="/v1/chat/completions",
    model="SmolLM2-135M",
    run="k3f9",
    status=200,
    outcome="served",
    streamed=True,
    prompt_tokens=1200,
    generated_tokens=64,
    tokens_per_s=41.26,
    load_s=7.2,
    line_s=0.0004,
    first_byte_s=7.81,
    total_s=9.4,
    sent_bytes=9000,
)


def event(seq: int, **members: Any) -> wire.Event:
    """An event."""
    return wire.Event.model_validate(
        {"seq": seq, "at": f"2026-11-30T11:20:{seq:02}Z", "kind": "state"} | members
    )
