"""The client as a process: signals, pipes, terminals, a full disk, and what it imports."""

from __future__ import annotations

import ast
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

import lllm3090ctl
from lllm3090d import wire
from lllm3090d.errors import ErrorCode, LlmError
from tests.fakes.control_server import (
    ADMITTED,
    INSTANCE,
    LOADING,
    MODELS,
    PLAN,
    READY,
    STATUS,
    WAIT_S,
    ControlServer,
    Stream,
    changed,
    ctl,
    event,
    spawn_ctl,
)

pytestmark = pytest.mark.unit

STOPPED = wire.Cancelled(token=ADMITTED.token, stopped=True)
SHARED = wire.Cancelled(token=ADMITTED.token, stopped=False)
NO_SUCH_LOAD = LlmError(ErrorCode.NO_SUCH_LOAD, "No load has this token.")


@contextmanager
def releasing(event: threading.Event) -> Iterator[threading.Event]:
    """An event that is set when the block is left, so that no server thread waits for a test that failed."""
    try:
        yield event
    finally:
        event.set()


def first_line(process: subprocess.Popen[str]) -> str:
    """The first line of stderr; ends the process when none comes."""
    assert process.stderr is not None
    timer = threading.Timer(WAIT_S, process.kill)
    timer.start()
    try:
        return process.stderr.readline()
    finally:
        timer.cancel()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_load_goes_on_in_the_daemon(number: signal.Signals) -> None:
    """The client says so, how to watch it and how to abort it, and asks the daemon nothing more."""
    with releasing(threading.Event()) as hold, ControlServer(load=Stream((ADMITTED, hold, READY))) as server:
        process = spawn_ctl(server, "load", "smol lm; x")
        assert "admitted" in first_line(process)
        process.send_signal(number)
        out, err = process.communicate(timeout=WAIT_S)
        assert server.next_request().target == "/v1/load"
        assert server.seen.empty()
    assert process.returncode == 130
    assert out == ""
    command = f"lllm3090ctl --socket {server.path}"
    assert err == (
        "lllm3090ctl: Interrupted: The daemon goes on loading smol lm; x.\n"
        f"Hint: Watch it: {command} ps\n"
        f"      Abort it: {command} unload 'smol lm; x'\n"
    )


def test_load_interrupted_before_the_first_line() -> None:
    """The daemon has the request but has not said anything yet."""
    with releasing(threading.Event()) as hold, ControlServer(load=Stream((hold, READY))) as server:
        process = spawn_ctl(server, "load", "smol")
        server.next_request()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert "once it has the request, it loads smol" in err
    assert "unload smol" in err
    assert out == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (STOPPED, "The load of smol was cancelled."),
        (SHARED, "goes on, because somebody else waits for it"),
        (NO_SUCH_LOAD, "could not be cancelled: No load has this token."),
    ],
)
def test_interrupt_that_cancels(
    number: signal.Signals, answer: wire.Cancelled | LlmError, says: str
) -> None:
    """The token of the load is sent on a connection of its own, while the stream is still open."""
    with (
        releasing(threading.Event()) as hold,
        ControlServer(load=Stream((ADMITTED, hold, READY)), cancel=answer) as server,
    ):
        process = spawn_ctl(server, "load", "smol", "--cancel-on-interrupt")
        assert "admitted" in first_line(process)
        process.send_signal(number)
        out, err = process.communicate(timeout=WAIT_S)
        loaded, cancelled = server.next_request().body, server.next_request().body
        assert server.seen.empty()
    assert isinstance(loaded, wire.LoadBody)
    assert isinstance(cancelled, wire.CancelBody)
    assert cancelled.token == loaded.token
    assert process.returncode == 130
    assert says in err
    assert out == ""


def test_cancel_before_the_daemon_knows_the_load() -> None:
    """The question is repeated until the daemon has read the request that it is about."""
    with (
        releasing(threading.Event()) as hold,
        ControlServer(load=Stream((hold, READY)), cancel=[NO_SUCH_LOAD, NO_SUCH_LOAD, STOPPED]) as server,
    ):
        process = spawn_ctl(server, "load", "smol", "--cancel-on-interrupt")
        server.next_request()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_S)
        assert [server.next_request().target for _ in range(3)] == ["/v1/cancel"] * 3
    assert process.returncode == 130
    assert "The load of smol was cancelled." in err


def test_second_interrupt_does_not_wait_for_the_first() -> None:
    """A daemon that does not confirm the cancel cannot hold the person."""
    with (
        releasing(threading.Event()) as hold,
        ControlServer(load=Stream((ADMITTED, hold, READY)), cancel=Stream((hold, STOPPED))) as server,
    ):
        process = spawn_ctl(server, "load", "smol", "--cancel-on-interrupt")
        assert "admitted" in first_line(process)
        process.send_signal(signal.SIGINT)
        assert [server.next_request().target for _ in range(2)] == ["/v1/load", "/v1/cancel"]
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    assert "Interrupted again before the daemon confirmed" in err


def test_interrupted_load_in_json() -> None:
    """The last line is a problem document that tells what came of the load."""
    with (
        releasing(threading.Event()) as hold,
        ControlServer(load=Stream((ADMITTED, hold, READY)), cancel=STOPPED) as server,
    ):
        process = spawn_ctl(server, "load", "smol", "--json", "--cancel-on-interrupt")
        assert process.stdout is not None
        assert wire.LoadLine.model_validate_json(process.stdout.readline()) == ADMITTED
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 130
    (line,) = out.splitlines()
    assert '"code": "interrupted"' in line
    assert '"cancelled": true' in line
    assert err == ""


def test_interrupt_of_other_commands_is_quiet() -> None:
    """Following events until Ctrl-C is the ordinary use."""
    with releasing(threading.Event()) as hold, ControlServer(events=Stream((event(1), hold))) as server:
        process = spawn_ctl(server, "events", "--follow")
        assert process.stdout is not None
        assert process.stdout.readline().startswith("1  ")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, out, err.strip()) == (130, "", "")


def test_lines_arrive_as_they_are_sent() -> None:
    """Nothing is held back in a buffer, even in a pipe: the second is only sent once the first is seen."""
    with (
        releasing(threading.Event()) as hold,
        ControlServer(events=Stream((event(1), hold, event(2)))) as server,
    ):
        process = spawn_ctl(server, "events")
        assert process.stdout is not None
        assert process.stdout.readline().startswith("1  ")
        hold.set()
        out, _ = process.communicate(timeout=WAIT_S)
    assert out.startswith("2  ")
    assert process.returncode == 0


def test_reader_that_goes_away_ends_the_client_quietly() -> None:
    """As in ``lllm3090ctl events --follow | head -n 1``."""
    with releasing(threading.Event()) as hold:
        many = [event(n % 60) for n in range(1, 5000)]
        with ControlServer(events=Stream((event(1), hold, *many))) as server:
            process = spawn_ctl(server, "events", "--follow")
            assert process.stdout is not None
            process.stdout.readline()
            process.stdout.close()
            hold.set()
            assert process.stderr is not None
            err = process.stderr.read()
            process.stderr.close()
            assert process.wait(WAIT_S) == 1
    assert err == ""


@pytest.mark.parametrize("arguments", [["status"], ["ps"], ["--help"]])
def test_full_disk_is_told(arguments: list[str]) -> None:
    """A result that could not be written is no success."""
    listing = wire.Instances(instances=(INSTANCE,))
    with ControlServer(status=STATUS, instances=listing) as server, Path("/dev/full").open("w") as full:
        process = spawn_ctl(server, *arguments, stdout=full)
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert err == "lllm3090ctl: The output cannot be written: No space left on device\n"


def test_encoding_of_the_terminal_is_no_obstacle() -> None:
    """What it cannot show is written as an escape."""
    listing = wire.Instances(instances=(changed(INSTANCE, name="模型"),))
    with ControlServer(instances=listing) as server:
        process = spawn_ctl(server, "ps", env={"PYTHONIOENCODING": "ascii"})
        out, err = process.communicate(timeout=WAIT_S)
    assert (process.returncode, err) == (0, "")
    assert r"\u6a21\u578b" in out


def on_terminal(
    server: ControlServer,
    *arguments: str,
    stream: str,
    release: tuple[str, threading.Event] | None = None,
    env: Mapping[str, str] | None = None,
) -> tuple[str, int]:
    """Run with one stream on a terminal; what was drawn there, and the exit status.

    The event of ``release`` is set as soon as its text was drawn.
    """
    ours, theirs = pty.openpty()
    environment = {"TERM": "xterm", "COLUMNS": "100"} | dict(env or {})
    process = spawn_ctl(server, *arguments, env=environment, **{stream: theirs})
    os.close(theirs)
    drawn = b""
    try:
        while piece := os.read(ours, 4096):
            drawn += piece
            if release and release[0].encode() in drawn:
                release[1].set()
    except OSError:  # EIO: the process has closed the terminal
        pass
    finally:
        os.close(ours)
    process.communicate(timeout=WAIT_S)
    return drawn.decode(), process.returncode


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_long_lines_are_folded_between_words(stream: str) -> None:
    """The line of a load that was ready, and a failure with its hint."""
    refused = LlmError(ErrorCode.NOT_LOADED, "word " * 40 + "end.", hint="hint " * 40 + "end.")
    with ControlServer(load=Stream((READY,)), unload=refused) as server:
        command = "load" if stream == "stdout" else "unload"
        drawn, _ = on_terminal(server, command, "x", stream=stream, env={"COLUMNS": "60"})
    lines = drawn.splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 60


def test_the_bar_is_full_when_the_model_is_ready() -> None:
    """Although LOADING told of less than its price, and nothing later of more."""
    with ControlServer(load=Stream((LOADING, READY))) as server:
        drawn, _ = on_terminal(server, "load", "x", stream="stderr", env={"COLUMNS": "100"})
    last = [line for line in drawn.splitlines() if "ready" in line][-1].rsplit("\x1b[2K", 1)[-1]
    assert last.startswith("SmolLM2-135M: ready")
    assert "498.0 MiB" in last
    assert "of 512.0" not in last


def test_tables_on_a_terminal_hold_names_in_check() -> None:
    """Neither escapes nor markup in a name are obeyed, and nothing is cut off."""
    listing = wire.Instances(instances=(changed(INSTANCE, name="[red]x\x1b[2J[/]" + "u" * 150 + "end"),))
    with ControlServer(instances=listing, plan=PLAN) as server:
        drawn, status = on_terminal(server, "ps", stream="stdout")
        assert status == 0
        assert "[red]" in drawn
        assert r"\x1b" in drawn
        assert "\x1b[2J" not in drawn
        assert drawn.count("u") >= 150
        drawn, _ = on_terminal(server, "plan", "x", "--explain", stream="stdout")
    assert "30 layers [x] 8192" in drawn


@pytest.mark.parametrize(("width", "columns"), [(80, "80"), (80, ""), (80, "no number"), (100, "100")])
def test_a_narrow_terminal_leaves_columns_out_and_says_so(width: int, columns: str) -> None:
    """Where nobody tells the width, a terminal is taken to be 80 wide, as this one does not know its own."""
    long = changed(MODELS.models[0], name="Qwen3.6-35B-A3B-Q4KS")
    with ControlServer(models=changed(MODELS, models=(long,))) as server:
        drawn, status = on_terminal(
            server, "models", stream="stdout", env={"COLUMNS": columns, "NO_COLOR": "1"}
        )
    assert status == 0
    head, row, note = drawn.splitlines()[:3]
    assert head.startswith("NAME ")
    assert row.startswith("Qwen3.6-35B-A3B-Q4KS  dense vision  ")
    assert row.endswith("  ready")
    assert width - 20 < len(row) <= width
    assert note.startswith("(Left out for want of width: ")
    assert "EVIDENCE" in note


def test_the_head_of_a_table_is_bold_unless_that_is_not_wanted() -> None:
    bold = "\x1b[1mNAME"
    with ControlServer(models=MODELS) as server:
        assert bold in on_terminal(server, "models", stream="stdout")[0]
        assert bold not in on_terminal(server, "models", stream="stdout", env={"NO_COLOR": "1"})[0]
        assert bold not in on_terminal(server, "models", stream="stdout", env={"TERM": "dumb"})[0]
        assert bold not in ctl(server, "models").stdout


def test_load_on_a_terminal_draws_a_bar() -> None:
    """State and figures of the memory are seen while it loads."""
    with (
        releasing(threading.Event()) as hold,
        ControlServer(load=Stream((ADMITTED, LOADING, hold, READY))) as server,
    ):
        drawn, status = on_terminal(
            server, "load", "smol", stream="stderr", release=("50.0 of 512.0 MiB", hold)
        )
        assert hold.is_set()
    assert status == 0
    assert "admitted" in drawn
    assert "smol: loading" in drawn


def test_status_imports_only_what_it_needs() -> None:
    """No module that costs more than it gives: the client has to answer at once."""
    program = (
        "import sys\nfrom lllm3090ctl.cli import cli\n"
        "try:\n    cli.main(sys.argv[1:])\nfinally:\n    print(*sorted(sys.modules), file=sys.stderr)"
    )
    with ControlServer(status=STATUS) as server:
        done = subprocess.run(
            [sys.executable, "-c", program, "--socket", str(server.path), "status"],
            capture_output=True,
            text=True,
            check=True,
            timeout=WAIT_S,
        )
    loaded = {name.partition(".")[0] for name in done.stderr.split()}
    assert "click" in loaded
    assert not loaded & {"rich", "pydantic", "aiohttp", "asyncio", "dataclasses", "subprocess", "lllm3090d"}


def test_the_client_imports_nothing_of_the_daemon() -> None:
    """It must work where the daemon's libraries do not."""
    modules = sorted(Path(lllm3090ctl.__file__).parent.rglob("*.py"))
    assert len(modules) > 5
    for module in modules:
        for node in ast.walk(ast.parse(module.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not [name for name in names if name.partition(".")[0] == "lllm3090d"], module


def test_interrupt_handlers_are_put_back() -> None:
    """Loading inside another program leaves its signals alone."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with ControlServer(load=Stream((READY,))) as server:
        assert ctl(server, "load", "smol").exit_code == 0
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
