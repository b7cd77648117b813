"""Programs that use a model: what is known of it, whether it will do for an agent, and starting them."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from lllm3090ctl import environment, loading
from lllm3090ctl.client import Client
from lllm3090ctl.documents import Document
from lllm3090ctl.environment import AGENT_FLOOR_TOKENS, AGENT_PROMPT_TOKENS, CHAT, Facts
from lllm3090ctl.exits import ExitStatus
from lllm3090ctl.failures import Failure, as_failure, own_failure
from lllm3090ctl.output import Screen
from lllm3090ctl.progress import display
from lllm3090ctl.text import clean, count, shell_word

SERVING = frozenset({"ready", "busy", "stalled"})
CLAUDE = "claude"
HOW_TO_INSTALL_CLAUDE = "npm install -g @anthropic-ai/claude-code"


def facts(client: Client, name: str) -> Facts:
    """What a model gives its clients: as it is loaded, else as it would be.

    Args:
        client: the daemon.
        name: as typed.

    Raises:
        Failure: whatever keeps it from being known; a plan that does not fit now is made for the empty card.
    """
    instance = loaded(client, name)
    if instance is not None:
        return of_instance(instance)
    try:
        view = client.plan({"model": name})
    except Failure as failure:
        if failure.exit_status != ExitStatus.REFUSED:
            raise
        return _on_the_empty_card(client, name, failure)
    if not view.truth("fits"):
        return _on_the_empty_card(client, view.text("model"), None)
    return Facts(
        view.text("model"), view.whole("window_tokens"), view.whole("parallel"), "plan", _purpose(view)
    )


def loaded(client: Client, name: str) -> Document | None:
    """The instance of a model that serves; None where it does not."""
    serving = [each for each in client.instances().children("instances") if each.text("state") in SERVING]
    found = next((each for each in serving if each.text("name") == name), None)
    if found is not None or not serving:
        return found
    canonical = client.inspect({"model": name}).maybe_text("name")
    return next((each for each in serving if each.text("name") == canonical), None)


def of_instance(view: Document) -> Facts:
    """Those of a model that serves."""
    return Facts(
        view.text("name"), view.whole("window_tokens"), view.whole("parallel"), "loaded", _purpose(view)
    )


def default_model(client: Client) -> str:
    """The only model that serves and generates text.

    Raises:
        Failure: ``no_model_named`` where there is none, or several.
    """
    names = [
        each.text("name")
        for each in client.instances().children("instances")
        if each.text("state") in SERVING and _purpose(each) == CHAT
    ]
    if len(names) == 1:
        return names[0]
    detail = (
        f"Several models are loaded: {', '.join(names)}."
        if names
        else "No model is loaded that generates text."
    )
    raise own_failure(
        "no_model_named",
        "No model was named",
        detail,
        exit_status=ExitStatus.USAGE,
        hint=f"Name one: {client.command} claude --model NAME. What there is: {client.command} models",
    )


def ensure_loaded(client: Client, name: str, screen: Screen, *, may_load: bool) -> Document:
    """The instance of a model, once it serves; its load is shown as ``load`` does.

    Raises:
        Failure: why it does not come up; ``not_loaded`` where it may not be loaded.
    """
    if not may_load:
        instance = loaded(client, name)
        if instance is None:
            raise own_failure(
                "not_loaded",
                "The model is not loaded",
                f"{name} is not loaded, and is not to be (--no-load).",
                exit_status=ExitStatus.NOT_FOUND,
                hint=f"Load it: {client.command} load {shell_word(name)}",
            )
        return instance
    # With JSON standard output is the answer's alone.
    with display(name, Screen(as_json=False), quiet=screen.as_json) as shown:
        body = {"model": name, "token": loading.new_token()}
        last, _ = loading.load(client, body, shown, cancel_on_interrupt=False)
    if last.text("kind") == "failed":
        raise as_failure(last.child("problem").members)
    return last.child("instance")


def require_chat(client: Client, known: Facts) -> None:
    """Let a model pass in that generates text.

    Raises:
        Failure: ``wrong_purpose``, as the gateway would say.
    """
    if not known.chats:
        raise own_failure(
            "wrong_purpose",
            "The model does not serve this",
            f"{known.model} is a model for {known.purpose}: it generates no text, so no agent can use it.",
            exit_status=ExitStatus.USAGE,
            hint=f"Name another one: {client.command} models",
        )


def require_agent(client: Client, known: Facts) -> None:
    """Let a model pass in whose window an agent can work.

    Raises:
        Failure: ``window_too_small`` with the arithmetic and what gives more; ``wrong_purpose``.
    """
    require_chat(client, known)
    if known.window_tokens >= AGENT_FLOOR_TOKENS:
        return
    missing = AGENT_FLOOR_TOKENS - known.window_tokens
    total = known.window_tokens * known.slots
    shared = f" ({known.slots} slots share {total:,})" if known.slots > 1 else ""
    ways = _ways_out(client, known)
    raise own_failure(
        "window_too_small",
        "The window is too small for an agent",
        f"A conversation of {known.model} holds {count(known.window_tokens, 'token')}{shared}. An agent sends"
        f" about {AGENT_PROMPT_TOKENS:,} before your first word, so it takes {AGENT_FLOOR_TOKENS:,}:"
        f" {missing:,} are missing.",
        exit_status=ExitStatus.REFUSED,
        hint="\n".join([*ways, "To try it all the same: --anyway"]),
        details={
            "model": known.model,
            "window_tokens": known.window_tokens,
            "floor_tokens": AGENT_FLOOR_TOKENS,
            "missing_tokens": missing,
        },
    )


def settings(values: Mapping[str, str]) -> str:
    """For ``claude --settings``: the same variables where a settings file of the person's has others; no key in it."""
    told = {name: value for name, value in values.items() if name not in environment.SECRETS}
    return json.dumps({"env": told}, separators=(",", ":"))


def execute(program: str, arguments: Sequence[str], values: Mapping[str, str], hint: str) -> NoReturn:
    """Become a program with these variables.

    Raises:
        Failure: ``program_not_found``.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # The interpreter ignores it, which would be handed down.
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        os.execvpe(program, [program, *arguments], environment.changed(os.environ, values))  # noqa: S606 - meant
    except OSError as error:
        signal.signal(signal.SIGPIPE, before)
        missing = isinstance(error, FileNotFoundError)
        why = "is not in PATH" if missing else f"cannot be run: {error.strerror or error}"
        raise own_failure(
            "program_not_found",
            "The program cannot be run",
            f"{clean(program)} {why}.",
            exit_status=ExitStatus.NOT_FOUND,
            hint=hint,
        ) from error


def _on_the_empty_card(client: Client, name: str, refusal: Failure | None) -> Facts:
    """As the list of models has it, where there is no room just now: idle models may go for it."""
    canonical = client.inspect({"model": name}).maybe_text("name")
    for view in client.models().children("models"):
        window = view.maybe_whole("window_tokens")
        if view.text("name") == canonical and window:
            slots = view.maybe_whole("parallel") or 1
            return Facts(view.text("name"), window, slots, "empty-card", _purpose(view))
    raise refusal or own_failure(
        "does_not_fit",
        "It does not fit",
        f"There is no room for {name}.",
        exit_status=ExitStatus.REFUSED,
        hint=f"See why: {client.command} plan {shell_word(name)}",
    )


def _purpose(view: Document) -> str:
    """What a model serves; text where a daemon does not say."""
    return view.maybe_text("purpose") or CHAT


def _ways_out(client: Client, known: Facts) -> list[str]:
    """What gives a window that is large enough, as far as the daemon knows."""
    word, other = shell_word(known.model), f"Another model will do: see VERDICT in {client.command} models"
    try:
        view = client.plan({"model": known.model})
    except Failure:  # there is no room beside what is loaded; what would fit is told by that command
        return [f"What else it could have: {client.command} plan {word} --explain", other]
    trained = view.whole("trained_context_tokens")
    if trained < AGENT_FLOOR_TOKENS:
        return [f"It was trained for {count(trained, 'token')}, so no launch of it will do.", other]
    unload = f"{client.command} unload {word} && " if known.basis == "loaded" else ""
    plans = [("", view.whole("window_tokens"))]
    plans += [
        (f" {each.text('ask')}", each.whole("window_tokens")) for each in view.children("alternatives")
    ]
    found = [
        f"{window:,} tokens: {unload}{client.command} load {word}{clean(ask)}"
        for ask, window in plans
        if window >= AGENT_FLOOR_TOKENS
    ]
    smallest = view.maybe_child("smallest_card")
    if not found and smallest is not None:
        found = [f"It takes a card of {smallest.whole('gib')} GiB, or a smaller type of cache."]
    return [*found[:3], other]
