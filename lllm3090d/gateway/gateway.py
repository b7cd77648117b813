"""A request to the gateway, from its head to the last byte of its answer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from aiohttp import hdrs, web

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway import dialects, purposes
from lllm3090d.gateway.body import Body
from lllm3090d.gateway.filters import CHANGED, LARGEST_CHANGED_BYTES, TOO_LARGE, filtered, is_changed
from lllm3090d.gateway.guard import Rules, check, check_place, cors_headers
from lllm3090d.gateway.house import House, Served
from lllm3090d.gateway.naming import name_wanted
from lllm3090d.gateway.record import Outcome, Record
from lllm3090d.gateway.relay import EVENTS, relay, relay_events, request_headers
from lllm3090d.gateway.routes import HEALTH, MODELS, MODELS_SHORT, Dialect, Route, Where, dialect_of, find
from lllm3090d.gateway.seating import Seating
from lllm3090d.gateway.turns import Priority
from lllm3090d.gateway.upstream import Exchange
from lllm3090d.planning.units import MIB
from lllm3090d.serving.idle import keep_alive_s
from lllm3090d.settings import GatewayLoad

log = logging.getLogger(__name__)

REQUEST_ID = "x-request-id"
PRIORITY = "x-priority"
KEEP_ALIVE = "x-keep-alive"
TRIES = 3  # to reach an engine that ends before anything was sent to it
Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Gateway:
    """Answers what comes to the gateway's port.

    Args:
        house: the daemon.
        rules: the present ones: who may ask.
        models: answers ``/v1/models`` and below.
        ended: told of each request that has ended.
    """

    def __init__(
        self, house: House, rules: Callable[[], Rules], models: Answer, ended: Callable[[Record], None]
    ) -> None:
        self._house = house
        self._rules = rules
        self._models = models
        self._ended = ended
        loop = asyncio.get_running_loop()
        self._clock = loop.time
        self.seating = Seating(house, loop.time)
        # Requests that have not ended.
        self.in_flight: dict[str, Record] = {}

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; whatever happens, it ends in one record."""
        record = Record(
            request_id=f"req_{secrets.token_hex(10)}",
            path=request.raw_path.partition("?")[0][:200],
            began_s=self._clock(),
        )
        self.in_flight[record.request_id] = record
        try:
            return await self._answered(request, record)
        except (asyncio.CancelledError, ConnectionError) as error:
            if record.outcome is Outcome.SERVED:
                record.outcome = Outcome.CLIENT_CLOSED
            if isinstance(error, ConnectionError):
                # The server closes the connection in both cases, but tells the journal of this one with a traceback.
                raise asyncio.CancelledError from error
            raise
        finally:
            record.total_s = self._clock() - record.began_s
            record.settle()
            del self.in_flight[record.request_id]
            self._ended(record)

    async def _answered(self, request: web.BaseRequest, record: Record) -> web.StreamResponse:
        dialect = dialect_of(request.raw_path)
        try:
            return await self._answer(request, record)
        except LlmError as error:
            record.code = str(error.code)
            if error.code is ErrorCode.ENGINE_FAILED:
                record.outcome = Outcome.ENGINE_ERROR
            else:
                record.outcome = Outcome.REFUSED
            if record.begun:
                # A part of the answer was sent: the connection's end is all that tells that it is not the whole.
                log.warning("an answer broke off", extra={"model": record.model, "reason": error.message})
                _cut(request)
                raise ConnectionResetError(error.message) from error
            return self._failure(request, record, error, dialect)
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:  # the edge: the client gets an answer, the journal the traceback
            log.error("a request failed unexpectedly", exc_info=error, extra={"path": record.path})
            record.code, record.outcome = str(ErrorCode.INTERNAL), Outcome.REFUSED
            if record.begun:
                _cut(request)
                raise ConnectionResetError(str(error)) from error
            internal = LlmError(
                ErrorCode.INTERNAL,
                f"the gateway made a mistake: {type(error).__name__}: {error}",
                hint="Please report it with: journalctl --user-unit lllm3090d -n 50",
            )
            return self._failure(request, record, internal, dialect)

    def _failure(
        self, request: web.BaseRequest, record: Record, error: LlmError, dialect: Dialect
    ) -> web.StreamResponse:
        record.status = dialects.status(error)
        headers = {REQUEST_ID: record.request_id, **dialects.headers(error)}
        with contextlib.suppress(LlmError):
            check_place(request.headers, self._rules())
            headers |= cors_headers(request.headers, self._rules())
        return web.Response(
            status=record.status,
            body=dialects.body(error, dialect, record.request_id),
            content_type="application/json",
            headers=headers,
        )

    async def _answer(self, request: web.BaseRequest, record: Record) -> web.StreamResponse:
        rules = self._rules()
        path = request.raw_path.partition("?")[0]
        if request.method == hdrs.METH_OPTIONS:
            check_place(request.headers, rules)
            record.status = 204
            return web.Response(status=204, headers=cors_headers(request.headers, rules))
        check(request.headers, rules)
        extra = {REQUEST_ID: record.request_id, **cors_headers(request.headers, rules)}
        if (
            path in HEALTH
            and request.method in {hdrs.METH_GET, hdrs.METH_HEAD}
            and "model" not in request.query
        ):
            record.status = 200
            return web.json_response({"status": "ok"}, headers=extra)
        if path in {MODELS, MODELS_SHORT} or path.startswith(f"{MODELS}/"):
            response = await self._models(request)
            response.headers.update(extra)
            record.status = response.status
            return response
        route = find(request.method, request.raw_path)
        if route is None:
            raise LlmError(
                ErrorCode.NO_SUCH_ROUTE,
                f"{request.method} {path[:200]} is no address of the gateway.",
                hint="Addresses are those of OpenAI's, Anthropic's and llama-server's API, such as"
                " /v1/chat/completions; any other of an engine: /upstream/MODEL/PATH.",
            )
        record.path = route.pattern
        record.priority = _priority(request.headers)
        with contextlib.closing(Body(request, self._house.settings.gateway_body_mib * MIB)) as body:
            try:
                return await self._pass_on(request, route, body, extra, record)
            except LlmError:
                if body.problem is not None:
                    raise body.problem from None
                raise

    async def _pass_on(
        self, request: web.BaseRequest, route: Route, body: Body, extra: Mapping[str, str], record: Record
    ) -> web.StreamResponse:
        name = record.model = await self._model(route, body)
        purposes.check(route, name, await self._house.purpose(name))
        policy = self._house.settings.gateway_load
        if route.load and policy is GatewayLoad.RETRY:
            self.seating.require(name)
        load = route.load and policy is GatewayLoad.WAIT
        stream = _Stream(request, extra, record)
        async with contextlib.AsyncExitStack() as stack:
            try:
                served, exchange = await self._reached(stack, route, name, body, stream, load=load)
                whole, changed = await _filtered(route, body, served)
                if changed and stream.response is None:
                    extra = {**extra, CHANGED: changed}
                elif changed and stream.response is not None:  # its head has been sent
                    await stream.response.write(f": {CHANGED}: {changed}\n\n".encode())
                length = len(whole) if whole is not None else body.length_bytes
                head = await exchange.send(
                    request.method,
                    route.target,
                    request_headers(request.raw_headers, length if body.was_sent else None),
                    whole if whole is not None else body.pieces(),
                )
                if stream.response is None:
                    return await relay(request, exchange, head, extra, record)
                await relay_events(stream.response, request, exchange, head, record)
            except LlmError as error:
                if stream.response is None:
                    raise
                record.code, record.outcome = str(error.code), Outcome.ENGINE_ERROR
                shown = body.problem or error
                await stream.response.write(dialects.event(shown, route.dialect, record.request_id))
        await stream.response.write_eof()
        return stream.response

    async def _reached(
        self,
        stack: contextlib.AsyncExitStack,
        route: Route,
        name: str,
        body: Body,
        stream: _Stream,
        *,
        load: bool,
    ) -> tuple[Served, Exchange]:
        """A seat, and a connection to its engine, for as long as the stack lasts.

        An engine may have ended while the request stood in its line, and nothing was sent to it yet. So where it is
        started again, the request waits for that.
        """
        record = stream.record
        for tries_left in range(TRIES - 1, -1, -1):
            async with contextlib.AsyncExitStack() as one:
                seat = self.seating.seat(name, record, duty=route.duty, load=load, priority=record.priority)
                served = await self._seated(one.enter_async_context(seat), body, stream)
                record.run = served.run
                # While it waited the model may have been loaded for something else.
                purposes.check(route, name, served.purpose)
                # Before the seat is given back.
                one.callback(_note_keep_alive, stream.request.headers, body, record)
                try:
                    exchange = await one.enter_async_context(Exchange(served.engine))
                except LlmError:
                    if not (load and tries_left and await self._house.comes_back(name, served.run)):
                        raise
                else:
                    await stack.enter_async_context(one.pop_all())
                    return served, exchange
        raise AssertionError("the last try returns or raises")

    async def _seated(self, seat: Coroutine[Any, Any, Served], body: Body, stream: _Stream) -> Served:
        """Wait for a seat; a client that wants a stream is sent signs of life meanwhile.

        The wait is not a task of its own: most have a seat at once, and each task is three more turns of the loop.
        """
        waits, signs = asyncio.current_task(), list[asyncio.Task[None]]()
        failed: BaseException | None = None

        def ended(task: asyncio.Task[None]) -> None:
            nonlocal failed
            if not task.cancelled() and (failed := task.exception()) is not None and waits is not None:
                waits.cancel()  # neither the load nor the place in line is wanted

        def begin() -> None:
            signs.append(asyncio.create_task(self._keep_alive(body, stream)))
            signs[0].add_done_callback(ended)

        timer = asyncio.get_running_loop().call_later(self._house.settings.gateway_keepalive_s, begin)
        try:
            return await seat
        except asyncio.CancelledError:
            if failed is not None and waits is not None and waits.uncancel() == 0:
                raise failed from None
            raise
        finally:
            timer.cancel()
            for task in signs:
                task.remove_done_callback(ended)
                task.cancel()
                await asyncio.wait({task})

    async def _keep_alive(self, body: Body, stream: _Stream) -> None:
        """Send signs of life until there is a seat."""
        while await body.member("stream") is True:
            await stream.keep_alive()
            await asyncio.sleep(self._house.settings.gateway_keepalive_s)

    async def _model(self, route: Route, body: Body) -> str:
        """The name of the model that a request means.

        Raises:
            LlmError: INVALID_REQUEST where it names none and none is meant, UNKNOWN_MODEL, AMBIGUOUS_MODEL.
        """
        settings, serving = self._house.settings, self._house.serving_names()
        named: object = route.model
        if named is None and route.where is Where.BODY:
            named = await body.member("model")
        default, meanings = settings.gateway_default_model, settings.gateway_models
        name = name_wanted(named, route.dialect, serving, default, meanings)
        return name if name in serving else await self._house.canonical(name)


class _Stream:
    """A stream of events that is begun before the engine was asked, because its model is on its way."""

    def __init__(self, request: web.BaseRequest, extra: Mapping[str, str], record: Record) -> None:
        self.request = request
        self._extra = extra
        self.record = record
        self.response: web.StreamResponse | None = None

    async def keep_alive(self) -> None:
        """Send a sign of life."""
        if self.response is None:
            headers = {hdrs.CONTENT_TYPE: EVENTS, hdrs.CACHE_CONTROL: "no-cache", **self._extra}
            self.response = web.StreamResponse(headers=headers)
            self.record.status, self.record.streamed, self.record.begun = self.response.status, True, True
            await self.response.prepare(self.request)
        await self.response.write(dialects.KEEP_ALIVE)


async def _filtered(route: Route, body: Body, served: Served) -> tuple[bytes | None, str]:
    """The body where it goes out as a whole, and what of it was changed, for a person; empty for nothing."""
    wanted = served.reasoning
    if wanted is None or not is_changed(route.pattern, wanted):
        return await body.small(), ""
    whole = await body.within(LARGEST_CHANGED_BYTES)
    if whole is None:
        return None, TOO_LARGE
    if len(whole) > MIB:  # long enough to be felt by others
        done = await asyncio.to_thread(filtered, whole, route.pattern, wanted)
    else:
        done = filtered(whole, route.pattern, wanted)
    return done.body, ", ".join(done.changes)


def _note_keep_alive(headers: Mapping[str, str], body: Body, record: Record) -> None:
    """For how long the model may stay without use: of the header, or the member that Ollama's clients send."""
    said = headers.get(KEEP_ALIVE)
    record.keep_alive_s = keep_alive_s(body.seen.get("keep_alive") if said is None else said)


def _priority(headers: Mapping[str, str]) -> Priority:
    word = headers.get(PRIORITY, "").strip().upper()
    return Priority[word] if word in Priority.__members__ else Priority.NORMAL


def _cut(request: web.BaseRequest) -> None:
    """Close a connection so that nobody takes what was sent for the whole."""
    if request.transport is not None:
        request.transport.abort()
