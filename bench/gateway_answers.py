"""Answers of an engine, byte for byte: recorded ones, and generated ones of every shape that HTTP allows.

    python -m bench.gateway_answers        records them anew from the engine of set-up with SmolLM2

What is recorded lies in tests/data/gateway, one file an answer: head, framing and body as they came from its socket.
"""

from __future__ import annotations

import gzip
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h11

from bench import _support as support
from tests.fakes.unix_http import health
from tests.system.harness import REPOSITORY

RECORDED = REPOSITORY / "tests" / "data" / "gateway"
LARGE_BYTES = 20_000_000
START_LIMIT_S = 60.0
CHAT = "/v1/chat/completions"
_SAY = {
    "model": "small",
    "messages": [{"role": "user", "content": "Say hello."}],
    "max_tokens": 24,
    "seed": 1,
}
_TEXT = {"model": "small", "prompt": "Once upon a time", "max_tokens": 24, "n_predict": 24, "seed": 1}
_ASK: dict[str, tuple[str, str, Any]] = {
    "chat": ("POST", CHAT, _SAY),
    "chat-stream": ("POST", CHAT, _SAY | {"stream": True, "stream_options": {"include_usage": True}}),
    "chat-logprobs": ("POST", CHAT, _SAY | {"logprobs": True, "top_logprobs": 2, "max_tokens": 4}),
    "chat-bad-role": ("POST", CHAT, _SAY | {"messages": [{"role": 7}]}),
    "chat-bad-format": ("POST", CHAT, _SAY | {"response_format": {"type": "verse"}}),
    "text": ("POST", "/v1/completions", _TEXT),
    "text-stream": ("POST", "/v1/completions", _TEXT | {"stream": True}),
    "native": ("POST", "/completion", _TEXT),
    "native-stream": ("POST", "/completion", _TEXT | {"stream": True}),
    "messages": ("POST", "/v1/messages", _SAY),
    "messages-stream": ("POST", "/v1/messages", _SAY | {"stream": True}),
    "messages-count": ("POST", "/v1/messages/count_tokens", _SAY),
    "responses": ("POST", "/v1/responses", {"model": "small", "input": "Hi.", "max_output_tokens": 16}),
    "responses-stream": (
        "POST",
        "/v1/responses",
        {"model": "small", "input": "Hi.", "max_output_tokens": 16, "stream": True},
    ),
    "embeddings-refused": ("POST", "/v1/embeddings", {"model": "small", "input": "x"}),
    "infill-refused": ("POST", "/infill", {"model": "small", "input_prefix": "a", "input_suffix": "b"}),
    "tokenize": ("POST", "/tokenize", {"content": "Hello, wörld \U0001f600", "with_pieces": True}),
    "detokenize": ("POST", "/detokenize", {"tokens": [1, 2, 3]}),
    "template": ("POST", "/apply-template", _SAY),
    "props": ("GET", "/props", None),
    "slots": ("GET", "/slots", None),
    "metrics": ("GET", "/metrics", None),
    "health": ("GET", "/health", None),
    "nothing": ("GET", "/nothing-there", None),
}


@dataclass(frozen=True, slots=True)
class Recorded:
    """One answer.

    Attributes:
        name: for a report.
        wire: head, framing and body.
        method: that it answers.
    """

    name: str
    wire: bytes
    method: str = "POST"

    def read(self) -> tuple[int, bytes]:
        """Status and body, without the framing."""
        protocol = h11.Connection(h11.CLIENT)
        protocol.send(h11.Request(method=self.method, target="/", headers=[("host", "e")]))
        protocol.send(h11.EndOfMessage())
        protocol.receive_data(self.wire)
        protocol.receive_data(b"")
        status, body = 0, []
        while not isinstance(event := protocol.next_event(), h11.EndOfMessage):
            if isinstance(event, h11.Response):
                status = event.status_code
            elif isinstance(event, h11.Data):
                body.append(bytes(event.data))
        return status, b"".join(body)


def recorded() -> list[Recorded]:
    """What an engine has said."""
    return [
        Recorded(path.stem, path.read_bytes(), _ASK[path.stem][0])
        for path in sorted(RECORDED.glob("*.http"))
    ]


def generated(count: int, seed: int) -> Iterator[Recorded]:
    """Answers of any status, framing, encoding and size up to 20 MB; the same for the same seed."""
    chance = random.Random(seed)  # noqa: S311  # to be the same each time
    for number in range(count):
        body = _body(
            chance, LARGE_BYTES if number == 0 else chance.choice([0, 1, 90, 4000, 70_000, 300_000])
        )
        fields, encoded = ["X-Number: 1"], body
        if chance.random() < 0.3:
            encoded = gzip.compress(body, compresslevel=1, mtime=0)
            fields.append("Content-Encoding: gzip")
        kind = chance.choice(["application/json", "text/event-stream", "audio/wav", "text/plain; charset=x"])
        status = chance.choice([200, 200, 200, 201, 400, 401, 404, 413, 429, 500, 503])
        head = f"HTTP/1.1 {status} Said\r\nContent-Type: {kind}\r\n" + "".join(f"{f}\r\n" for f in fields)
        framing = chance.choice(["length", "chunked", "chunked", "close"])
        if framing == "length":
            wire = f"{head}Content-Length: {len(encoded)}\r\n\r\n".encode() + encoded
        elif framing == "close":
            wire = f"{head}Connection: close\r\n\r\n".encode() + encoded
        else:
            wire = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + _chunked(chance, encoded)
        yield Recorded(f"{number}: {status} {kind} {framing} {len(encoded)}", wire)


def _body(chance: random.Random, size: int) -> bytes:
    if chance.random() < 0.5:
        return chance.randbytes(size)
    line = b"data: " + json.dumps({"text": "h\u00e9 \U0001f600\r\n"}).encode() + b"\n\n"
    return (line * (size // len(line) + 1))[:size]


def _chunked(chance: random.Random, body: bytes) -> bytes:
    at, pieces = 0, []
    while at < len(body):
        size = chance.choice([1, 7, 300, 70_000, 1_000_000])
        piece = body[at : at + size]
        pieces.append(b"%x%b\r\n%b\r\n" % (len(piece), chance.choice([b"", b";x=1"]), piece))
        at += size
        if len(pieces) > 50:  # not a million of them for 20 MB
            pieces.append(b"%X\r\n%b\r\n" % (len(body) - at, body[at:]) if at < len(body) else b"")
            break
    return b"".join(pieces) + b"0\r\n" + chance.choice([b"", b"X-Sum: 7\r\n"]) + b"\r\n"


def _record(path: Path) -> None:
    """Ask an engine each of the questions, and keep what it says."""
    RECORDED.mkdir(exist_ok=True)
    for name, (method, target, body) in _ASK.items():
        data = b"" if body is None else json.dumps(body).encode()
        head = f"{method} {target} HTTP/1.1\r\nHost: engine\r\nConnection: close\r\n"
        if body is not None:
            head += f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n"
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(START_LIMIT_S)
            connection.connect(str(path))
            connection.sendall(f"{head}\r\n".encode() + data)
            said = b"".join(iter(lambda: connection.recv(1 << 16), b""))
        (RECORDED / f"{name}.http").write_bytes(said)
        print(f"{name}: {said.split(maxsplit=2)[1].decode()}, {len(said)} bytes")


def main() -> int:
    """Record."""
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        path = Path(directory) / "engine.sock"
        # By a name that is the same on every machine, for /props tells it.
        Path(directory, "small.gguf").symlink_to(support.checkpoint("smollm2.gguf"))
        command = [str(support.engine_dir() / "llama-server"), "--host", str(path), "--threads", "1"]
        command += ["--model", "small.gguf", "--ctx-size", "2048", "--parallel", "2"]
        command += ["--slots", "--metrics", "--no-warmup", "--alias", "small"]
        engine = subprocess.Popen(
            command, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            began = time.monotonic()
            while health(path) != 200:
                if engine.poll() is not None or time.monotonic() - began > START_LIMIT_S:
                    sys.exit("the engine does not start")
                time.sleep(0.05)
            _record(path)
        finally:
            engine.kill()
            engine.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
