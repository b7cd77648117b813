"""What programs need to know to use a model through the gateway: facts of its launch as variables. Pure.

Names are those of the programs themselves: ``OPENAI_*`` of OpenAI's libraries and whatever follows them,
``ANTHROPIC_*`` and ``CLAUDE_CODE_*`` of Claude Code (checked with 2.1.197).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import NamedTuple

SHELLS = ("sh", "fish", "csh", "json")
# What an agent sends before a person's first word, and the least window above it as the planner rounds it.
AGENT_PROMPT_TOKENS = 40_000
AGENT_FLOOR_TOKENS = 40_960
# Of one answer: what Claude Code allows itself, where the window has room for it.
MOST_OUTPUT_TOKENS = 32_000
LEAST_OUTPUT_SHARE = 8
# Each of them would lead Claude Code elsewhere, or is another's key.
UNSET = (
    "ANTHROPIC_API_KEY",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_FOUNDRY",
    "CLAUDE_CODE_USE_VERTEX",
)
CHAT = "chat"  # the purpose of a model that generates text
SECRETS = frozenset({"OPENAI_API_KEY", "ANTHROPIC_AUTH_TOKEN"})
_MODEL_VARIABLES = (
    "ANTHROPIC_MODEL",
    "ANTHROPIC_SMALL_FAST_MODEL",  # of old releases
    "ANTHROPIC_DEFAULT_FABLE_MODEL",
    "ANTHROPIC_DEFAULT_HAIKU_MODEL",
    "ANTHROPIC_DEFAULT_OPUS_MODEL",
    "ANTHROPIC_DEFAULT_SONNET_MODEL",
    "CLAUDE_CODE_SUBAGENT_MODEL",
)


class Facts(NamedTuple):
    """What a model gives its clients.

    Attributes:
        model: its name.
        window_tokens: that a conversation holds, prompt and answer together.
        slots: conversations at a time.
        basis: where that is known from: ``loaded``, ``plan``, or ``empty-card``.
        purpose: what it serves: ``chat``, ``embedding`` or ``rerank``.
    """

    model: str
    window_tokens: int
    slots: int
    basis: str
    purpose: str = CHAT

    @property
    def chats(self) -> bool:
        """It generates text: only then agents, and Anthropic's API, can use it."""
        return self.purpose == CHAT

    @property
    def subagents(self) -> int:
        """That can work at a time beside the one who asks them: a slot each, but at least one."""
        return max(1, self.slots - 1)

    @property
    def output_tokens(self) -> int:
        """Of one answer at most: what an agent's prompt leaves, and an eighth of the window in any case."""
        left = max(self.window_tokens - AGENT_PROMPT_TOKENS, self.window_tokens // LEAST_OUTPUT_SHARE)
        return max(1, min(MOST_OUTPUT_TOKENS, left))


def variables(facts: Facts, url: str, key: str) -> dict[str, str]:
    """The environment of a program that is to use the model: of one that does not generate text, OpenAI's alone.

    Args:
        facts: of the model.
        url: of the gateway, without a path.
        key: to be sent.
    """
    openai = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key}
    if not facts.chats:
        return openai
    return {
        **openai,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": key,
        **dict.fromkeys(_MODEL_VARIABLES, facts.model),
        # Without it a window of 200,000 tokens is assumed for names that Claude Code does not know.
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(facts.window_tokens),
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(facts.output_tokens),
        "CLAUDE_CODE_MAX_CONCURRENT_SUBAGENTS": str(facts.subagents),
        # A line that differs in each conversation, at the very beginning of what could otherwise be computed once.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        # Else a model is asked for one at the beginning, beside the work, which takes a slot.
        "CLAUDE_CODE_DISABLE_TERMINAL_TITLE": "1",
    }


def unset(values: Mapping[str, str]) -> tuple[str, ...]:
    """What must not be set beside these variables: nothing where they are not for Claude Code."""
    return UNSET if "ANTHROPIC_MODEL" in values else ()


def commands(values: Mapping[str, str], shell: str) -> str:
    """Text for a shell to evaluate, which sets and unsets; whatever is in a value stays in it.

    Args:
        values: by name.
        shell: one of :data:`SHELLS`.
    """
    gone = unset(values)
    if shell == "json":
        return json.dumps({**values, **dict.fromkeys(gone)}, indent=2)
    # A semicolon each, for those who evaluate it without quotes.
    if shell == "fish":
        sets = [f"set -gx {name} {_fish(value)};" for name, value in values.items()]
        return "\n".join([*sets, *(f"set -e {name};" for name in gone)])
    if shell == "csh":
        sets = [f"setenv {name} {_csh(value)};" for name, value in values.items()]
        return "\n".join([*sets, *(f"unsetenv {name};" for name in gone)])
    sets = [f"export {name}={shlex.quote(value)};" for name, value in values.items()]
    return "\n".join([*sets, *((f"unset {' '.join(gone)};",) if gone else ())])


def changed(inherited: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a program."""
    gone = unset(values)
    return {name: value for name, value in inherited.items() if name not in gone} | dict(values)


def _fish(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _csh(value: str) -> str:
    """Within quotes an exclamation mark and a line's end still mean something there."""
    quoted = value.replace("'", "'\\''").replace("!", "\\!").replace("\n", "\\\n")
    return f"'{quoted}'"
