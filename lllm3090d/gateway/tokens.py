"""How many tokens a request had: read from the end of its answer, where every dialect tells it."""

from __future__ import annotations

import re
from collections import deque

KEPT_BYTES = 1 << 14
# OpenAI, Anthropic and Responses, llama.cpp's own; the last of each counts.
_PROMPT = re.compile(rb'"(?:prompt_tokens|input_tokens|tokens_evaluated)"\s*:\s*(\d{1,12})')
_GENERATED = re.compile(rb'"(?:completion_tokens|output_tokens|tokens_predicted)"\s*:\s*(\d{1,12})')
_TIMED = re.compile(rb'"(prompt_n|cache_n|predicted_n)"\s*:\s*(\d{1,12})')
# Anthropic counts beside its prompt tokens what was in the cache; others count it among them.
_CACHED = re.compile(rb'"cache_read_input_tokens"\s*:\s*(\d{1,12})')
# How a stream ends, as each dialect has it.
_END = re.compile(rb'^data: \[DONE\]|"type"\s*:\s*"(?:message_stop|response\.completed)"', re.MULTILINE)
_GENERATION_MS = re.compile(rb'"predicted_ms"\s*:\s*(\d{1,12}(?:\.\d{1,20})?)')


class Tail:
    """The end of an answer, and its beginning: Anthropic tells the prompt's tokens in the first event."""

    def __init__(self) -> None:
        self._head = b""
        self._last: deque[bytes] = deque()  # pieces that have the last KEPT_BYTES in them
        self._last_bytes = 0

    def feed(self, piece: bytes) -> None:
        """The next piece."""
        if len(self._head) < KEPT_BYTES:
            self._head += piece[: KEPT_BYTES - len(self._head)]
        self._last.append(piece[-KEPT_BYTES:])
        self._last_bytes += len(self._last[-1])
        while self._last_bytes - len(self._last[0]) >= KEPT_BYTES:
            self._last_bytes -= len(self._last.popleft())

    @property
    def has_ended(self) -> bool:
        """The last event of a stream has come: with it what tells of tokens, and a client may leave now."""
        return _END.search(b"".join(self._last)[-KEPT_BYTES:]) is not None

    def tokens(self) -> tuple[int | None, int | None]:
        """Tokens of the prompt and of the answer; None where it does not tell."""
        tail = b"".join(self._last)[-KEPT_BYTES:]
        timed = {name: int(number) for name, number in _TIMED.findall(tail)}
        prompt = self._prompt(tail)
        if prompt is None and b"prompt_n" in timed:
            prompt = timed[b"prompt_n"] + timed.get(b"cache_n", 0)
        if prompt is None:
            prompt = self._prompt(self._head)
        generated = _last(_GENERATED, tail)
        return prompt, timed.get(b"predicted_n") if generated is None else generated

    def _prompt(self, text: bytes) -> int | None:
        prompt = _last(_PROMPT, text)
        return None if prompt is None else prompt + (_last(_CACHED, text) or 0)

    def generation_s(self) -> float | None:
        """Seconds that the engine generated for; None where the answer does not tell."""
        found = _GENERATION_MS.findall(b"".join(self._last)[-KEPT_BYTES:])
        return float(found[-1]) / 1000 if found else None


def _last(pattern: re.Pattern[bytes], text: bytes) -> int | None:
    found = pattern.findall(text)
    return int(found[-1]) if found else None
