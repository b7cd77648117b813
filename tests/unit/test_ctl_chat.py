"""``chat``: a question, a conversation, and what stops an answer."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lllm3090d import wire
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.instance import InstanceState
from tests.fakes.control_server import (
    INSPECTED,
    INSTANCE,
    READY,
    STATUS,
    WAIT_S,
    ControlServer,
    RawServer,
    Script,
    Stream,
    changed,
    ctl,
    spawn_ctl,
)
from tests.fakes.gateway_port import GatewayPort

pytestmark = pytest.mark.unit

AGAIN_S = 1.0

END: dict[str, Any] = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
USAGE: dict[str, Any] = {
    "choices": [],
    "usage": {"prompt_tokens": 12, "completion_tokens": 3},
    "timings": {"predicted_per_second": 41.25},
}
DONE = b"data: [DONE]\n\n"
ENDED = wire.RunView(run="a1", state=InstanceState.STOPPING, is_live=True, why="unload requested")


def thought(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"reasoning_content": text}, "finish_reason": None}]}


@contextmanager
def scene(gateway: GatewayPort, **scripts: Script) -> Iterator[ControlServer]:
    """A daemon whose gateway answers by script."""
    with gateway as port:
        usual: dict[str, Any] = {
            "status": changed(STATUS, gateway={"address": port.url}),
            "load": Stream((READY,)),
            "instances": wire.Instances(instances=(INSTANCE,)),
            "history": wire.RunHistory(name="SmolLM2-135M", runs=()),
            "inspect": changed(INSPECTED, name="SmolLM2-135M"),
        }
        with ControlServer(**(usual | scripts)) as server:
            yield server


def asks(server: ControlServer, *arguments: str, given: str | None = None) -> tuple[int, str, str]:
    """Status, output and errors of a client whose standard input is a pipe, or nothing."""
    stdin = subprocess.DEVNULL if given is None else subprocess.PIPE
    process = spawn_ctl(server, "chat", *arguments, stdin=stdin)
    out, err = process.communicate(given, timeout=WAIT_S)
    return process.returncode, out, err


def test_an_answer_is_written_as_it_comes() -> None:
    hold = threading.Event()
    with scene(GatewayPort([["Hel", hold, "lo\x1b[2J", END, USAGE, DONE]])) as server:
        process = spawn_ctl(
            server, "chat", "smol", "Hi", "-v", "--system", "Be brief.", stdin=subprocess.DEVNULL
        )
        assert process.stdout is not None
        assert os.read(process.stdout.fileno(), 100) == b"Hel"
        hold.set()
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out) == (0, "lo\x1b[2J\n")  # to a pipe as it is
    assert re.fullmatch(
        r"\(12 tokens of prompt, 3 tokens of answer, 41\.2 tokens/s, first after \d+\.\d\d s, \d+\.\d\d s in all\)\n",
        err,
    )


def test_what_is_asked() -> None:
    gateway = GatewayPort([["x", END, DONE]], key="sesame")
    with scene(gateway) as server:
        process = spawn_ctl(
            server, "chat", "smol", "Why?", "-s", "Be brief.", "--max-tokens", "9",
            stdin=subprocess.DEVNULL, env={"LLLM3090_API_KEY": "sesame"},
        )  # fmt: skip
        assert process.communicate(timeout=WAIT_S)[0] == "x\n"
        status, out, err = asks(server, "smol", "Why?")
    assert (status, out) == (9, "") and "asks for a key" in err
    asked = gateway.asked[0]
    assert asked.path == "/v1/chat/completions"
    assert asked.document == {
        "model": "SmolLM2-135M",  # the name that the daemon found
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}],
        "max_tokens": 9,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    ("prompt", "given", "asked"),
    [
        (None, "from a pipe\n", "from a pipe"),
        ("Sum up:", "text\n", "Sum up:\n\ntext"),
        ("Only this.", "", "Only this."),
    ],
)
def test_a_pipe_is_read(prompt: str | None, given: str, asked: str) -> None:
    gateway = GatewayPort([["x", END, DONE]])
    with scene(gateway) as server:
        assert asks(server, "smol", *([prompt] if prompt else []), given=given)[0] == 0
        assert asks(server, "smol", given=" \n")[0] == 2  # nothing to ask
        assert asks(server, "smol", "", given="")[0] == 2
    assert gateway.asked[0].document["messages"][-1]["content"] == asked and len(gateway.asked) == 1


def test_thinking_is_no_part_of_the_answer() -> None:
    with scene(GatewayPort([[thought("hm"), thought("m"), "42", END, DONE]])) as server:
        assert asks(server, "smol", "?") == (0, "42\n", "")
        assert asks(server, "smol", "?", "--thinking") == (0, "42\n", "hmm\n\n")


def test_an_answer_that_was_cut_says_so() -> None:
    cut = {"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    with scene(GatewayPort([["and th", cut, DONE]])) as server:
        status, out, err = asks(server, "smol", "?")
    assert (status, out) == (0, "and th\n") and "was cut" in err


def test_json_is_the_chunks_line_by_line() -> None:
    with scene(GatewayPort([["a", END, USAGE, DONE]])) as server:
        status, out, err = asks(server, "smol", "?", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert (
        (status, err) == (0, "")
        and lines[0]["choices"][0]["delta"] == {"content": "a"}
        and lines[1:] == [END, USAGE]
    )


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "exit_status", "words"),
    [
        (400, {"error": {"message": "prompt is too long: 9 tokens > 8 maximum", "code": "context_length_exceeded"}}, 2,
         "prompt is too long"),
        (507, {"error": {"message": "No room. Unload it.", "code": "insufficient_vram", "hint": "Unload it."}}, 5,
         "No room.\nHint: Unload it."),
        (502, {"error": {"message": "It ended.", "code": 502}}, 6, "It ended."),
        (500, b"oops", 6, "HTTP status 500"),
        (418, {"error": "teapot"}, 1, "HTTP status 418"),
    ],
)  # fmt: skip
def test_failures_of_the_gateway(status: int, body: Any, exit_status: int, words: str) -> None:
    with scene(GatewayPort([[body]], status=status)) as server:
        ended, out, err = asks(server, "smol", "?")
    assert (ended, out) == (exit_status, "") and words in err


@pytest.mark.parametrize(
    ("last", "exit_status", "words"),
    [
        (
            b'data: {"error": {"message": "The engine ended.", "code": "engine_failed"}}\n\n',
            6,
            "The engine ended.",
        ),
        (b"", 6, "ended too early"),
        (b"data: {\n\n", 1, "not JSON"),
        (b"data: 7\n\n", 1, "not a JSON object"),
        (b"<html>\n", 1, "no stream of events"),
    ],
)
def test_an_answer_that_breaks_off(last: bytes, exit_status: int, words: str) -> None:
    with scene(GatewayPort([["Hello", last]])) as server:
        ended, out, err = asks(server, "smol", "?")
    assert (ended, out) == (exit_status, "Hello\n") and words in err


@pytest.mark.parametrize(
    ("history", "words"),
    [
        (wire.RunHistory(name="S", runs=(ENDED,)), "SmolLM2-135M ended in the middle of its answer: unload requested."),
        (wire.RunHistory(name="S", runs=(ENDED.model_copy(update={"why": ""}),)), "ended too early"),
        (wire.RunHistory(name="S", runs=()), "ended too early"),
        (LlmError(ErrorCode.UNKNOWN_MODEL, "Nobody knows it.", hint="?"), "ended too early"),
    ],
)  # fmt: skip
def test_why_an_answer_broke_off_is_asked(history: Script, words: str) -> None:
    """A person sees that the model was unloaded, not only that a connection ended."""
    with scene(GatewayPort([["Hello", b""]]), history=history) as server:
        ended, out, err = asks(server, "smol", "?")
    assert (ended, out) == (6, "Hello\n") and words in err and "broke off" in err


def test_events_are_read_as_the_standard_has_it() -> None:
    script = b': a comment\r\nevent: x\r\nid: 1\r\ndata:{"choices":\r\ndata: []}\r\n\r\n' + DONE
    with scene(GatewayPort([[script]])) as server:
        assert asks(server, "smol", "?", "--json") == (0, '{"choices": []}\n', "")


def test_a_model_that_does_not_load_is_not_asked() -> None:
    gateway = GatewayPort([["x"]])
    with scene(gateway, load=LlmError(ErrorCode.INSUFFICIENT_VRAM, "no room")) as server:
        assert asks(server, "smol", "?")[0] == 5
    with scene(gateway, instances=wire.Instances(instances=())) as server:
        assert asks(server, "smol", "?", "--no-load")[0] == 4
    assert gateway.asked == []


def test_without_a_gateway_the_engine_itself_is_asked() -> None:
    body = (
        f"data: {json.dumps({'choices': [{'index': 0, 'delta': {'content': 'own socket'}}]})}\n\n".encode()
        + DONE
    )
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    with RawServer(head + body) as engine:
        here = changed(READY, instance=changed(INSTANCE, endpoint=str(engine.path)))
        off = changed(STATUS, gateway={"address": None})
        with ControlServer(status=off, load=Stream((here,))) as server:
            assert asks(server, "smol", "?") == (0, "own socket\n", "")
    with ControlServer(status=off, load=Stream((here,))) as server:
        assert asks(server, "smol", "?")[0] == 6  # it has gone


# --- at a terminal ----------------------------------------------------------------------------------------------------


class Terminal:
    """A person at a terminal."""

    def __init__(self, server: ControlServer, *arguments: str, home: Path) -> None:
        self._master, slave = pty.openpty()
        self.process = spawn_ctl(
            server, *arguments, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            env={"TERM": "dumb", "HOME": str(home)},
        )  # fmt: skip
        os.close(slave)
        self.seen = ""

    def until(self, words: str, within_s: float = WAIT_S) -> None:
        """Read until these appear; what was before is passed over from then on."""
        deadline = time.monotonic() + within_s
        while words not in self.seen:
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{words!r} does not come after {self.seen!r}"
            self.seen += os.read(self._master, 4096).decode()
        self.seen = self.seen.partition(words)[2]

    def types(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupts(self) -> None:
        """Press Ctrl-C until there is a new prompt: Python misses one that comes just before it waits for a key."""
        for _ in range(int(WAIT_S / AGAIN_S)):
            os.killpg(self.process.pid, signal.SIGINT)
            try:
                self.until("> ", AGAIN_S)
            except AssertionError:
                continue
            return
        raise AssertionError("Ctrl-C makes no new prompt")

    def close(self) -> int:
        """Its exit status."""
        status = self.process.wait(WAIT_S)
        os.close(self._master)
        return status


def test_a_conversation(tmp_path: Path) -> None:
    hold = threading.Event()
    gateway = GatewayPort(
        [["Blue\x1b]0;x\x07.", END, DONE], ["Because", hold], ["Again.", END, DONE], ["New.", END, DONE]]
    )
    with scene(gateway) as server:
        person = Terminal(server, "chat", "smol", home=tmp_path)
        person.until("/clear forgets")
        person.until("> ")
        person.types("Which colour?\n")
        person.until("Blue\\x1b]0;x\\x07.")  # nothing steers the terminal
        person.until("> ")
        person.types("Why?\n")
        person.until("Because")
        os.killpg(person.process.pid, signal.SIGINT)
        person.until("> ")
        assert gateway.left.wait(WAIT_S)  # the engine is told at once
        person.types("And?\n")
        person.until("Again.")
        person.until("> ")
        person.interrupts()  # with nothing under way it ends nothing
        person.types("/clear\n")
        person.until("> ")
        person.types("Hello\n")
        person.until("New.")
        person.until("> ")
        person.types("\x04")
        assert person.close() == 0
    said = [[turn["content"] for turn in each.document["messages"]] for each in gateway.asked]
    first = ["Which colour?", "Blue\x1b]0;x\x07.", "Why?"]
    assert said == [first[:1], first, [*first, "Because", "And?"], ["Hello"]]
    assert list(tmp_path.iterdir()) == []  # no history


def test_a_question_that_failed_may_be_asked_again(tmp_path: Path) -> None:
    gateway = GatewayPort([[b"data: {\n\n"], ["Yes.", END, DONE]])
    with scene(gateway) as server:
        person = Terminal(server, "chat", "smol", home=tmp_path)
        person.until("> ")
        person.types("Is it?\n")
        person.until("not JSON")
        person.until("> ")
        person.types("Is it?\n")
        person.until("Yes.")
        person.until("> ")
        person.types("/exit\n")
        assert person.close() == 0
    assert [len(each.document["messages"]) for each in gateway.asked] == [1, 1]


def test_an_interrupt_ends_a_single_question() -> None:
    gateway = GatewayPort([["Well", threading.Event()]])
    with scene(gateway) as server:
        process = spawn_ctl(server, "chat", "smol", "?", stdin=subprocess.DEVNULL)
        assert process.stdout is not None and os.read(process.stdout.fileno(), 100) == b"Well"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_S)
        assert gateway.left.wait(WAIT_S)
    assert (process.returncode, out, err) == (130, "\n", "")


def test_json_needs_a_question(tmp_path: Path) -> None:
    with scene(GatewayPort()) as server:
        person = Terminal(server, "chat", "smol", "--json", home=tmp_path)
        person.until("--json needs PROMPT")
        assert person.close() == 2
        assert ctl(server, "chat").exit_code == 2
