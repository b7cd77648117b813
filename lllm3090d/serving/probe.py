"""The first full batch: what an engine takes once it has computed a prompt, which it does not show while it loads.

With the first prompt come buffers that no estimate knows: those of BLAS, pools and graphs of the driver. The prompt is
one batch, so a person's request waits for one batch at most; the caller cancels the probe when one comes, and an engine
that is busy is not probed. Afterwards the slot holds two tokens of no meaning, which no other prompt begins with.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lllm3090d.checkpoints.purpose import Purpose
from lllm3090d.gpus.readings import CardKind
from lllm3090d.serving.engine_http import EngineTalkError, ask
from lllm3090d.settings import VerifyAfterLoad

log = logging.getLogger(__name__)

SAMPLE_INTERVAL_S = 0.05
SMALL_TIMEOUT_S = 5.0  # for what an engine answers without computing
# Judgement: a batch of 2,048 tokens takes 1 to 4 s on a card; a CPU may need minutes and is given up.
PROBE_TIMEOUT_S = 30.0
RERANK_TOKENS = 64  # for a question and what a template puts around both; judgement
LEAST_TOKENS = 2  # with fewer there is nothing to compute at once
# Words that differ, so that a mixture sends them to many experts. Its first token is what is kept for the tidying, and
# a conversation begins with the start token of its template.
TEXT = (
    "~ measure 7 rivers, 12 tools and 305 letters; gold rises where the slow winter music ends: "
    "print(x[0] + 1) // ask why / der Zug, le train, el tren - 42 % of green engines (or none) sleep = never! "
)


class PeakWatch:
    """Remembers the most that was ever read; stands in for the reading itself.

    Args:
        read: what the engine holds now, bytes; None where that cannot be read.
    """

    def __init__(self, read: Callable[[], int | None]) -> None:
        self._read = read
        self.peak_bytes = 0

    def __call__(self) -> int:
        """Read once; 0 where that cannot be done."""
        held = self._read() or 0
        self.peak_bytes = max(self.peak_bytes, held)
        return held

    async def during(self, work: asyncio.Future[Any], interval_s: float = SAMPLE_INTERVAL_S) -> None:
        """Read again and again until the work ends, however it does, and once more then."""
        while not work.done():
            self()
            await asyncio.wait({work}, timeout=interval_s)
        self()


def wants_probe(choice: VerifyAfterLoad, card_kind: CardKind) -> bool:
    """A prompt is to be computed: on a card only.

    Host memory shows a page once it was used, so a probe would not show a peak there, and takes a CPU far longer than
    the load itself.
    """
    return choice is VerifyAfterLoad.PROBE and card_kind is not CardKind.CPU


@dataclass(frozen=True, slots=True)
class Probe:
    """What to compute.

    Attributes:
        socket: of the engine.
        control_group: of its unit; None or empty refuses.
        batch_tokens: ``-b``.
        window_tokens: of one slot.
        predict_tokens: to be generated; with drafting enough for one draft, else 1.
        timeout_s: after which it is given up.
        purpose: what the engine serves.
    """

    socket: Path
    control_group: str
    batch_tokens: int
    window_tokens: int
    predict_tokens: int = 1
    timeout_s: float = PROBE_TIMEOUT_S
    purpose: Purpose = Purpose.CHAT

    @property
    def prompt_tokens(self) -> int:
        """A full batch, or what a slot can hold beside the answer."""
        if self.purpose is not Purpose.CHAT:
            return min(self.batch_tokens, self.window_tokens)
        return min(self.batch_tokens, self.window_tokens - self.predict_tokens - 1)


@dataclass(frozen=True, slots=True)
class Probed:
    """What came of it.

    Attributes:
        peak_bytes: the most that the engine held meanwhile; 0 where nobody looked.
        prompt_tokens: computed; 0 where the probe was skipped or not finished.
        seconds: that it took.
        skipped: why there was none, or no end of it; empty where there was.
    """

    peak_bytes: int
    prompt_tokens: int = 0
    seconds: float = 0.0
    skipped: str = ""


async def probe(what: Probe, held_bytes: Callable[[], int | None]) -> Probed:
    """Have an idle engine compute one batch, and look at its memory every 50 ms meanwhile.

    It can be cancelled at any time; the engine then stops after the batch at hand. Nothing else is raised.

    Args:
        what: engine and sizes.
        held_bytes: what the engine holds now; None where that cannot be read.
    """
    watch, began = PeakWatch(held_bytes), time.monotonic()
    running = _Running(what)
    work = asyncio.ensure_future(running.carry_out())
    try:
        await watch.during(work)
        tokens = work.result()
    except _SkipError as error:
        return Probed(watch.peak_bytes, 0, time.monotonic() - began, str(error))
    finally:
        work.cancel()
        await asyncio.wait({work})
    return Probed(watch.peak_bytes, tokens, time.monotonic() - began)


class _SkipError(Exception):
    """Why there is no probe."""


@dataclass(slots=True)
class _Running:
    """One probe under way."""

    what: Probe
    tokens: Sequence[int] = field(default=())

    async def carry_out(self) -> int:
        """Tokens of the prompt; raises _SkipError."""
        if self.what.prompt_tokens < LEAST_TOKENS:
            raise _SkipError(f"a slot of {self.what.window_tokens} tokens has no room for a prompt")
        slot = await self._idle_slot()
        tidy, *words = await self._words()
        count = self.what.prompt_tokens
        if self.what.purpose is Purpose.RERANK:
            return await self._score(count, len(words) + 1)
        prompt = (words * -(-count // len(words)))[:count]
        if self.what.purpose is Purpose.EMBEDDING:
            await self._asked("POST", "/embedding", {"content": prompt}, self.what.timeout_s)
            return count
        await self._complete(slot, prompt, self.what.predict_tokens, self.what.timeout_s)
        try:
            # Else the prompt would be copied to the prompt cache when the slot is needed, and found by a similar one.
            await self._complete(slot, [tidy], 1, SMALL_TIMEOUT_S)
        except _SkipError as error:
            log.info("the prompt of a probe was left in its slot", extra={"reason": str(error)})
        return count

    async def _idle_slot(self) -> int:
        """The last slot; the engine itself would take it, so that prompts to come find the others as they were."""
        slots = await self._asked("GET", "/slots", None, SMALL_TIMEOUT_S)
        if not isinstance(slots, list) or not slots or not all(isinstance(each, dict) for each in slots):
            raise _SkipError("it tells nothing of its slots")
        if any(each.get("is_processing") is not False for each in slots):
            raise _SkipError("it is busy with a request")
        number = slots[-1].get("id")
        if not isinstance(number, int):
            raise _SkipError("its slots have no numbers")
        return number

    async def _words(self) -> list[int]:
        """Tokens of a text, without any that begins a prompt."""
        asked = {"content": TEXT, "add_special": False}
        answer = await self._asked("POST", "/tokenize", asked, SMALL_TIMEOUT_S)
        tokens = answer.get("tokens") if isinstance(answer, dict) else None
        if not isinstance(tokens, list) or not all(isinstance(each, int) for each in tokens):
            raise _SkipError("it turns no text into tokens")
        if len(set(tokens)) < LEAST_TOKENS + 1:
            raise _SkipError("its vocabulary has no words")
        return [tokens[0], *(token for token in tokens[1:] if token != tokens[0])]

    async def _score(self, count: int, text_tokens: int) -> int:
        """Score one text of about so many tokens: a rerank engine takes no tokens, and gives no vectors."""
        times = (count - RERANK_TOKENS) // (text_tokens + 1)
        if times < 1:
            raise _SkipError(f"a slot of {self.what.window_tokens} tokens has no room for a text")
        asked = {"query": "gold", "documents": [TEXT * times]}
        await self._asked("POST", "/v1/rerank", asked, self.what.timeout_s)
        return times * text_tokens

    async def _complete(self, slot: int, prompt: Sequence[int], predict: int, timeout_s: float) -> None:
        request = {
            "prompt": list(prompt),
            "n_predict": predict,
            "id_slot": slot,
            "cache_prompt": False,
            "ignore_eos": True,
            "temperature": 0,
            "stream": False,
        }
        await self._asked("POST", "/completion", request, timeout_s)

    async def _asked(self, method: str, target: str, document: Any, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                reply = await ask(self.what.socket, self.what.control_group, method, target, document)
            if reply.status != 200:
                raise _SkipError(f"it answers {target} with {reply.status}{_reason(reply.body)}")
            return reply.document()
        except TimeoutError:
            raise _SkipError(f"it did not answer {target} within {timeout_s:g} s") from None
        except EngineTalkError as error:
            raise _SkipError(str(error)) from error


def _reason(body: bytes) -> str:
    text = body[:200].decode("utf-8", "replace").strip()
    return f": {text}" if text else ""
