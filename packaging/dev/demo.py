"""The main job, on real parts: start the daemon, load a model, ask one question, unload, stop.

Run by ``make demo`` inside ``user-manager``. Exit status 0 only if all of it happened. Standard library
only; it drives the product as a person does, by ``systemctl --user`` and ``lllm3090ctl``.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / ".demo"
BIN = ROOT / ".venv" / "bin"
UNITS = ("lllm3090d.service", "lllm3090d.socket", "lllm3090.slice")
MODEL_UNITS = "lllm3090-*.service"
MODEL = "smollm2"
MODEL_DIRECTORY = "SmolLM2-135M-Instruct"
QUESTION = "What is the capital of France? Answer in one sentence."
ANSWER_TIMEOUT_S = 120.0
MOST_ANSWER_TOKENS = 48


class DemoError(Exception):
    """A step failed; the message says which and why."""


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=ANSWER_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        """Connect to the path instead of a host."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def say(text: str) -> None:
    """One step, plainly."""
    print(f"\n==> {text}", flush=True)


def systemctl(*arguments: str, check: bool = True) -> str:
    """``systemctl --user``; returns its output."""
    done = subprocess.run(
        ["systemctl", "--user", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if check and done.returncode != 0:
        raise DemoError(f"systemctl --user {shlex.join(arguments)}: {done.stdout.strip()}")
    return done.stdout


def control(*arguments: str) -> None:
    """Run lllm3090ctl as a person would, its output on the screen."""
    print(f"$ lllm3090ctl {shlex.join(arguments)}", flush=True)
    status = subprocess.run([BIN / "lllm3090ctl", *arguments], check=False).returncode
    if status != 0:
        raise DemoError(f"lllm3090ctl {shlex.join(arguments)} ended with status {status}")


def control_json(*arguments: str) -> Any:
    """Run lllm3090ctl for a program."""
    command = [str(BIN / "lllm3090ctl"), *arguments, "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise DemoError(f"lllm3090ctl {shlex.join(arguments)} --json ended with status {done.returncode}")
    return json.loads(done.stdout)


def refuse_if_present() -> None:
    """Leave the person's own daemon alone."""
    for unit, verb in (("lllm3090d.service", "runs"), ("lllm3090d.socket", "listens")):
        if systemctl("is-active", unit, check=False).strip() in {"active", "activating", "reloading"}:
            raise DemoError(
                f"your own {unit} {verb} already. To see the demo, stop it first:\n"
                "    systemctl --user stop lllm3090d.socket lllm3090d.service\n"
                "  (models that run go on; or just use it: lllm3090ctl status)"
            )
    running = model_units()
    if running:
        raise DemoError(f"models of yours run; unload them first (lllm3090ctl unload NAME):\n{running}")


def model_units() -> str:
    """The transient units of models, one a line."""
    return systemctl("list-units", "--plain", "--no-legend", MODEL_UNITS).strip()


def prepare_models() -> Path:
    """A models directory with the one checkpoint, linked."""
    checkpoint = ROOT / ".engine" / "models" / "smollm2.gguf"
    if not checkpoint.exists():
        raise DemoError(f"{checkpoint} is missing; run: make demo")
    directory = DEMO / "models" / MODEL_DIRECTORY
    directory.mkdir(parents=True, exist_ok=True)
    link = directory / f"{MODEL_DIRECTORY}.gguf"
    link.unlink(missing_ok=True)
    link.symlink_to(checkpoint)
    return DEMO / "models"


def daemon_environment() -> Mapping[str, str]:
    """Settings of the demo's daemon: nothing of the person's own is read or written."""
    return {
        "LLLM3090_MODELS_DIR": str(prepare_models()),
        "LLLM3090_STATE_DIR": str(DEMO / "state"),
        "LLLM3090_LLAMA_DIR": str(ROOT / ".engine" / "llama"),
        "LLLM3090_CONFIG": str(DEMO / "config.toml"),  # not there: the defaults
    }


def quoted(value: str) -> str:
    """A value as systemd wants it in a unit file."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%") + '"'


@contextlib.contextmanager
def installed_units(environment: Mapping[str, str]) -> Iterator[None]:
    """The shipped units for this working tree, in the volatile unit directory, while the block runs."""
    directory = Path(os.environ["XDG_RUNTIME_DIR"]) / "systemd" / "user"
    drop_in = directory / "lllm3090d.service.d"
    drop_in.mkdir(parents=True, exist_ok=True)
    files = [directory / name for name in UNITS] + [drop_in / "demo.conf"]
    try:
        for name in UNITS:
            text = (ROOT / "systemd" / name).read_text(encoding="utf-8")
            executable = quoted(str(BIN / "lllm3090d"))
            (directory / name).write_text(text.replace("/usr/bin/lllm3090d", executable), encoding="utf-8")
        lines = [f"Environment={quoted(f'{name}={value}')}" for name, value in environment.items()]
        (drop_in / "demo.conf").write_text("\n".join(["[Service]", *lines, ""]), encoding="utf-8")
        systemctl("daemon-reload")
        yield
    finally:
        # All of them are ours: there were none before. After a failure a model may still run.
        systemctl("stop", "lllm3090d.socket", "lllm3090d.service", MODEL_UNITS, check=False)
        systemctl("stop", "lllm3090.slice", check=False)
        for file in files:
            file.unlink(missing_ok=True)
        drop_in.rmdir()
        systemctl("daemon-reload", check=False)


def ask(endpoint: str) -> None:
    """One question to the engine itself, over its Unix socket; prints the answer and the speed."""
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "max_tokens": MOST_ANSWER_TOKENS,
        "temperature": 0,
    }
    begin = time.monotonic()
    connection = UnixConnection(endpoint)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        text = response.read().decode("utf-8")
    finally:
        connection.close()
    elapsed_s = time.monotonic() - begin
    if response.status != http.HTTPStatus.OK:
        raise DemoError(f"the model answered with HTTP status {response.status}: {text[:300]}")
    answer = json.loads(text)
    content = answer["choices"][0]["message"]["content"].strip()
    tokens = answer["usage"]["completion_tokens"]
    if not content or tokens < 1:
        raise DemoError(f"the model gave an empty answer: {text[:300]}")
    speed = answer.get("timings", {}).get("predicted_per_second") or tokens / elapsed_s
    print(f"Question: {QUESTION}\nAnswer:   {content}")
    print(f"{tokens} tokens, {speed:.1f} tokens/s, {elapsed_s:.2f} s in all")


def endpoint_of(name: str) -> str:
    """Where the one running model listens."""
    instances = [item for item in control_json("ps")["instances"] if item["state"] in {"ready", "busy"}]
    if len(instances) != 1:
        raise DemoError(f"one ready model was expected, lllm3090ctl ps shows {len(instances)}")
    if name not in instances[0]["name"].lower():
        raise DemoError(f"the model that runs is {instances[0]['name']}, not {name}")
    return str(instances[0]["endpoint"])


def main_job() -> None:
    """The trip itself, once the units are there."""
    say("Starting the daemon: systemctl --user start lllm3090d")
    systemctl("start", "lllm3090d.service")
    print(systemctl("show", "lllm3090d.service", "-p", "ActiveState,SubState,MainPID,StatusText").strip())

    say(f"The plan for {MODEL}: what it takes, line by line, and what this machine can give")
    control("plan", MODEL)

    say("Loading it: a llama-server in a transient systemd unit of its own")
    control("load", MODEL)
    try:
        control("ps")
        print(model_units())

        say("Asking it one question, over its Unix socket")
        ask(endpoint_of(MODEL))
    finally:
        say("Unloading it")
        control("unload", MODEL)
    left = model_units()
    if left:
        raise DemoError(f"units are left after the unload: {left}")

    say("Stopping the daemon")
    systemctl("stop", "lllm3090d.socket", "lllm3090d.service")
    state = systemctl("show", "lllm3090d.service", "-p", "Result", "--value").strip()
    if state != "success":
        raise DemoError(f"the daemon did not stop cleanly: {state}")


def journal_tail() -> str:
    """The last lines of the daemon, and of systemd about it."""
    matches = ["SYSLOG_IDENTIFIER=lllm3090d", "+", "USER_UNIT=lllm3090d.service"]
    command = ["journalctl", "--no-pager", "--quiet", "--lines=40", "--output=short-precise", *matches]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout


def main() -> int:
    """Returns the exit status."""
    begin = time.monotonic()
    try:
        refuse_if_present()
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    try:
        with installed_units(daemon_environment()):
            main_job()
    except KeyboardInterrupt:
        print("\ndemo: interrupted; the daemon is stopped", file=sys.stderr)
        return 130
    except (DemoError, OSError, KeyError, ValueError) as error:
        print(f"\ndemo: FAILED: {error or type(error).__name__}", file=sys.stderr)
        print(f"--- the daemon's journal ---\n{journal_tail()}", file=sys.stderr)
        return 1
    say(f"All of it worked, in {time.monotonic() - begin:.1f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
