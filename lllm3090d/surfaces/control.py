"""The control API: HTTP with JSON on the Unix socket, for the user that owns the daemon and nobody else."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import struct
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import hdrs, web
from pydantic import BaseModel

from lllm3090d.engines.builds import Selection
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.files import exhausted
from lllm3090d.gateway.service import GatewayService
from lllm3090d.gpus.readings import Card
from lllm3090d.serving.actors import CALLER, client
from lllm3090d.serving.answers import Answer, Moved
from lllm3090d.serving.daemon import Daemon
from lllm3090d.serving.effects import LoadProgress
from lllm3090d.serving.engine_views import details_view, engines_view, next_engine_view, running_views
from lllm3090d.serving.events import Admitted, Failed, Joined, LoadDone, Queued
from lllm3090d.serving.inspection import inspect
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.listings import Listings
from lllm3090d.serving.observation import HOST, Observation
from lllm3090d.serving.placed import parts_of
from lllm3090d.serving.plan_requests import load_wish
from lllm3090d.serving.plan_views import plan_view
from lllm3090d.serving.previews import Previews
from lllm3090d.serving.running import Instance
from lllm3090d.serving.views import card_view, instance_view, path_text, pending_view
from lllm3090d.serving.wanted_views import wanted_views
from lllm3090d.surfaces.bodies import Body, validated
from lllm3090d.surfaces.history_api import HistoryApi
from lllm3090d.surfaces.keys_api import KeysApi
from lllm3090d.surfaces.memory_api import MemoryApi
from lllm3090d.surfaces.names_api import NamesApi
from lllm3090d.surfaces.openapi import document
from lllm3090d.surfaces.queries import flag
from lllm3090d.surfaces.requests_api import RequestsApi
from lllm3090d.surfaces.wanted_api import WantedApi
from lllm3090d.version import VERSION
from lllm3090d.wire import (
    CancelBody,
    Cancelled,
    EngineDetails,
    Engines,
    EngineView,
    InspectBody,
    Instances,
    InstanceView,
    LoadBody,
    LoadLine,
    LoadLineKind,
    PendingView,
    PinBody,
    Pinned,
    PlanBody,
    ReleaseBody,
    Released,
    Reset,
    ResetBody,
    ResumeBody,
    Resumed,
    RunningEngineView,
    SelectEngineBody,
    Status,
    UnloadBody,
    Unloaded,
    Version,
)

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
NDJSON = "application/x-ndjson"
PROBLEM_JSON = "application/problem+json"

Item = TypeVar("Item")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def problem_response(error: LlmError) -> web.Response:
    """An error as an RFC 9457 problem document."""
    return web.Response(
        status=error.kind.http_status, text=json.dumps(error.problem()) + "\n", content_type=PROBLEM_JSON
    )


def _json(model: BaseModel) -> web.Response:
    return web.Response(text=model.model_dump_json() + "\n", content_type="application/json")


@web.middleware
async def problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Render every failure as a problem document; what nobody expected is logged and said to be ours."""
    try:
        return await handler(request)
    except LlmError as error:
        return problem_response(exhausted(error) or error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return problem_response(_http_problem(request, error))
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:  # noqa: BLE001  # the edge: the client gets an answer, the journal the traceback
        return problem_response(_unexpected(request, error))


def _unexpected(request: web.Request, error: Exception) -> LlmError:
    if (shortage := exhausted(error)) is not None:
        return shortage
    log.error("a request failed unexpectedly", exc_info=error, extra={"path": request.path})
    return LlmError(
        ErrorCode.INTERNAL,
        f"the daemon made a mistake: {type(error).__name__}: {error}",
        hint="Please report it with: journalctl --user-unit lllm3090d -n 50",
    )


def _problem_line(error: LlmError) -> bytes:
    """A failure as the last line of a stream that has begun."""
    return json.dumps({"problem": error.problem()}).encode() + b"\n"


def _http_problem(request: web.Request, error: web.HTTPException) -> LlmError:
    if isinstance(error, web.HTTPRequestEntityTooLarge):
        return LlmError(
            ErrorCode.INVALID_REQUEST,
            f"the request body is larger than {MAX_BODY_BYTES} bytes",
            hint="See /v1/openapi.json for what is understood.",
        )
    method = (
        f"; {request.path} takes {', '.join(sorted(error.allowed_methods))}"
        if isinstance(error, web.HTTPMethodNotAllowed)
        else ""
    )
    return LlmError(
        ErrorCode.NO_SUCH_ROUTE,
        f"{request.method} {request.path}: {error.reason}{method}",
        hint="See /v1/openapi.json for what is understood.",
    )


@web.middleware
async def own_user_only(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse every other user, root included: what it may do, it does as this user."""
    transport = request.transport
    connection: socket.socket | None = transport.get_extra_info("socket") if transport else None
    if connection is None:
        raise ConnectionResetError("the client has left")
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", credentials)
    if uid != os.getuid():
        log.warning("a foreign user was refused", extra={"uid": uid})
        raise LlmError(
            ErrorCode.FORBIDDEN_PEER,
            f"this daemon belongs to uid {os.getuid()}; uid {uid} may not use it",
            hint="Run the client as that user.",
        )
    CALLER.set(client(uid, pid) if request.method == hdrs.METH_POST else None)
    return await handler(request)


async def _body(request: web.Request, model: type[Body]) -> Body:
    try:
        text = await request.read()
    except web.RequestPayloadError as error:  # encoded as something that it is not, or broken off
        raise LlmError(
            ErrorCode.NOT_JSON,
            f"the body of {request.method} {request.path} cannot be read: {error}",
            hint="Send it as it is, without a Content-Encoding.",
        ) from error
    try:
        json.loads(text)
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, absurdly long or deep
        raise LlmError(
            ErrorCode.NOT_JSON,
            f"the body of {request.method} {request.path} is not JSON: {error}",
            hint='Send an object, for example {"model": "qwen-27b"}.',
        ) from error
    return validated(text, model)


@dataclass(frozen=True, slots=True)
class _NextEngine:
    """What a status says of engines."""

    selection: Selection
    view: EngineView | None
    problem: LlmError | None
    running: tuple[RunningEngineView, ...]


def _problem(error: LlmError | None) -> dict[str, Any] | None:
    return error.problem() if error else None


def _beside(observation: Observation) -> LlmError | None:
    """Why one of the cards beside the main one gives nothing."""
    others = (state for state in observation.cards if state is not observation.main)
    return next((state.problem for state in others if state.problem is not None), None)


class ControlApi:
    """Routes and handlers; each converts, asks the daemon, converts back."""

    def __init__(self, daemon: Daemon, systemd_version: str) -> None:
        self.daemon = daemon
        self.previews = Previews(daemon)
        self.listings = Listings(daemon)
        # Set where there is one; it answers on a port of its own.
        self.gateway: GatewayService | None = None
        # Why nobody can ask over D-Bus; set where that is offered.
        self.dbus_problem: Callable[[], LlmError | None] = lambda: None
        self.memory = MemoryApi(daemon, lambda: self.gateway)
        self.happened = HistoryApi(daemon, self._stream)
        self.systemd_version = systemd_version

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[problems, own_user_only], client_max_size=MAX_BODY_BYTES)
        app.add_routes(
            [
                web.get("/v1/version", self.version),
                web.get("/v1/status", self.status),
                web.get("/v1/models", self.models),
                web.get("/v1/instances", self.instances),
                web.get("/v1/openapi.json", self.openapi),
                web.get("/v1/engines", self.engines),
                web.post("/v1/engines/select", self.select_engine),
                web.get("/v1/engines/{name}", self.engine),
                web.post("/v1/inspect", self.inspect),
                web.post("/v1/plan", self.plan),
                web.post("/v1/load", self.load),
                web.post("/v1/unload", self.unload),
                web.post("/v1/release", self.release),
                web.post("/v1/resume", self.resume),
                web.post("/v1/models/{name:.+}/pin", self.pin),
                web.post("/v1/models/{name:.+}/reset", self.reset),
                web.post("/v1/cancel", self.cancel),
                *self.memory.routes(),
                *self.happened.routes(),
                *RequestsApi(self.daemon, lambda: self.gateway, self._stream).routes(),
                *WantedApi(self.daemon, _body).routes(),
                *KeysApi(lambda: self.gateway, _body).routes(),
                *NamesApi(daemon=self.daemon, gateway=lambda: self.gateway).routes(),
            ]
        )
        return app

    # --- reading -------------------------------------------------------------------------------------------

    async def version(self, _: web.Request) -> web.Response:
        """``GET /v1/version``."""
        return _json(Version(version=VERSION))

    async def openapi(self, _: web.Request) -> web.Response:
        """``GET /v1/openapi.json``."""
        return web.json_response(document())

    async def status(self, _: web.Request) -> web.Response:
        """``GET /v1/status``: never fails as a whole; what cannot be read is a problem inside."""
        daemon = self.daemon
        await daemon.look_for_desktop()
        observation, budget = daemon.observe(), None
        card, card_problem = observation.card, observation.main.problem
        try:
            budget = daemon.scheduler.budgets(observation).get(card.uuid)
        except LlmError as error:
            card_problem = error
        engine = await asyncio.to_thread(self._engine, tuple(daemon.scheduler.instances))
        state_problem = await asyncio.to_thread(daemon.lookup.state_problem)
        watch_problem = daemon.lookup.watch_problem()
        return _json(
            Status(
                version=VERSION,
                pid=os.getpid(),
                started=daemon.started,
                systemd_version=self.systemd_version,
                card=card_view(
                    card,
                    observation.main.reading,
                    budget,
                    daemon.scheduler.ledger.charged_bytes(card.uuid),
                    card_problem,
                ),
                cards_problem=_problem(daemon.cards_problem or _beside(observation)),
                engine=engine.view,
                engine_problem=engine.problem.problem() if engine.problem else None,
                engine_choice=engine.selection.choice,
                engine_choice_problem=_problem(engine.selection.choice_problem),
                running_engines=engine.running,
                state_problem=state_problem.problem() if state_problem else None,
                watch_problem=watch_problem.problem() if watch_problem else None,
                bus_problem=_problem(daemon.bus_loss.problem),
                dbus_problem=_problem(self.dbus_problem()),
                journal_problem=_problem(daemon.log_keeper.problem),
                history_problem=_problem(daemon.history.problem()),
                models_dir=path_text(daemon.settings.models_dir),
                config_file=path_text(daemon.config_file),
                instances=self.instance_views(),
                pending=self.pending_views(),
                foreign_units=daemon.foreign_unit_views(),
                released=daemon.scheduler.released,
                wanted=await wanted_views(daemon.wanted, daemon.scheduler),
                autoload_wait=daemon.desktop_wait.view(),
                suspend=daemon.sleep.view(),
                gateway=self.gateway.view() if self.gateway else None,
            )
        )

    def _engine(self, instances: Iterable[Instance]) -> _NextEngine:
        engines, pin = self.daemon.lookup.engines, self.daemon.settings.engine_pin
        selection = engines.selection()
        try:
            build, capabilities = self.daemon.lookup.engine()
        except LlmError as error:
            return _NextEngine(selection, None, error, running_views(instances, None, None))
        view = next_engine_view(build, capabilities, pin)
        return _NextEngine(selection, view, None, running_views(instances, build, capabilities))

    async def engines(self, _: web.Request) -> web.Response:
        """``GET /v1/engines``: every build, each asked what it can do."""
        return _json(await asyncio.to_thread(self._engines, tuple(self.daemon.scheduler.instances)))

    def _engines(self, instances: Iterable[Instance]) -> Engines:
        engines = self.daemon.lookup.engines
        selection, states = engines.selection(), engines.all()
        chosen = next((each for each in states if each.build == selection.build), None)
        capabilities = chosen.capabilities if chosen else None
        pin, cards = self.daemon.settings.engine_pin, self._cards()
        return engines_view(states, selection, instances, capabilities, pin, cards=cards)

    async def engine(self, request: web.Request) -> web.Response:
        """``GET /v1/engines/{name}``: one build with its options; the first time its files are read whole."""
        return _json(await asyncio.to_thread(self._engine_details, request.match_info["name"]))

    def _engine_details(self, name: str) -> EngineDetails:
        engines = self.daemon.lookup.engines
        state = engines.named(name)
        digest = digest_problem = None
        if state.build is not None:
            try:
                digest = engines.digest(state.build)
            except LlmError as error:
                digest_problem = error
        pin = self.daemon.settings.engine_pin
        return details_view(state, engines.selection(), pin, digest, digest_problem, cards=self._cards())

    def _cards(self) -> tuple[Card, ...]:
        return tuple(reader.card for reader in self.daemon.readers)

    async def select_engine(self, request: web.Request) -> web.Response:
        """``POST /v1/engines/select``: choose the build of the next start; what runs goes on."""
        body = await _body(request, SelectEngineBody)
        await asyncio.to_thread(self.daemon.lookup.engines.choose, body.engine)
        return await self.engines(request)

    async def models(self, request: web.Request) -> web.Response:
        """``GET /v1/models?catalogue=``: with what each would get on the card, were nothing on it."""
        return _json(await self.listings.models(with_catalogue=flag(request, "catalogue")))

    async def inspect(self, request: web.Request) -> web.Response:
        """``POST /v1/inspect``: what a file is, by its headers alone."""
        body = await _body(request, InspectBody)
        return _json(await asyncio.to_thread(inspect, self.daemon.lookup, body))

    async def instances(self, _: web.Request) -> web.Response:
        """``GET /v1/instances``."""
        self.daemon.look_at_cards()
        return _json(
            Instances(
                instances=self.instance_views(),
                pending=self.pending_views(),
                foreign_units=self.daemon.foreign_unit_views(),
                released=self.daemon.scheduler.released,
                wanted=await wanted_views(self.daemon.wanted, self.daemon.scheduler),
            )
        )

    def pending_views(self) -> tuple[PendingView, ...]:
        """Loads that wait, as clients see them."""
        scheduler = self.daemon.scheduler
        return tuple(pending_view(each, scheduler.clock()) for each in scheduler.pending)

    def instance_views(self) -> tuple[InstanceView, ...]:
        """All instances as clients see them."""
        return tuple(self.instance_view(instance) for instance in self.daemon.scheduler.instances)

    def instance_view(self, instance: Instance) -> InstanceView:
        """An instance as clients see it."""
        since = self.daemon.since.get(instance.run, self.daemon.started)
        scheduler = self.daemon.scheduler
        return instance_view(
            instance,
            scheduler.ledger,
            since,
            scheduler.clock(),
            at_risk=self.daemon.risk_of(instance),
            restarts_hung=scheduler.restarts_hung,
        )

    # --- changing ------------------------------------------------------------------------------------------

    async def plan(self, request: web.Request) -> web.Response:
        """``POST /v1/plan``: what a load would get now, or a card that is not there would give."""
        return _json(await self.previews.plan(await _body(request, PlanBody)))

    async def load(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/load``: NDJSON until ready or failed; a refusal before that is a problem document."""
        body = await _body(request, LoadBody)
        began = time.monotonic()
        asked = asyncio.create_task(self.daemon.load(body.model, load_wish(body), body.token))
        try:
            # A client that leaves ends this handler, not the load.
            token, answers = await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(self._abandoned)
            raise
        return await self._stream(request, self._load_lines(token, answers, began))

    def _abandoned(self, asked: asyncio.Task[tuple[str, AsyncGenerator[Answer, None]]]) -> None:
        if asked.cancelled():
            return
        error = asked.exception()
        if error is None:
            self.daemon.forget(asked.result()[0])
        else:
            log.info("a load failed after its client had left", extra={"reason": str(error)})

    async def loading(self, body: LoadBody) -> AsyncGenerator[LoadLine]:
        """Have a model loaded; the lines until it is ready or has failed. Raises LlmError: refused before that."""
        began = time.monotonic()
        token, answers = await self.daemon.load(body.model, load_wish(body), body.token)
        return self._load_lines(token, answers, began)

    async def _load_lines(
        self, token: str, answers: AsyncGenerator[Answer], began: float
    ) -> AsyncGenerator[LoadLine, None]:
        async for answer in answers:
            elapsed = round(time.monotonic() - began, 4)
            match answer:
                case Admitted():
                    yield self._admitted(elapsed, answer)
                case Joined(run=run):
                    yield self._line(LoadLineKind.JOINED, elapsed, token, run)
                case Queued():
                    yield LoadLine(
                        kind=LoadLineKind.STATE,
                        elapsed_s=elapsed,
                        token=token,
                        state=InstanceState.QUEUED,
                        why=answer.why or None,
                    )
                case Moved(state=state):
                    yield LoadLine(kind=LoadLineKind.STATE, elapsed_s=elapsed, token=token, state=state)
                case LoadProgress():
                    yield LoadLine(
                        kind=LoadLineKind.PROGRESS,
                        elapsed_s=elapsed,
                        token=token,
                        state=InstanceState.LOADING,
                        resident_bytes=answer.resident_bytes,
                        expected_bytes=answer.expected_bytes,
                    )
                case LoadDone(run=run):
                    yield self._line(LoadLineKind.READY, elapsed, token, run)
                case Failed(error=error):
                    yield LoadLine(
                        kind=LoadLineKind.FAILED, elapsed_s=elapsed, token=token, problem=error.problem()
                    )

    def _admitted(self, elapsed: float, answer: Admitted) -> LoadLine:
        line = self._line(LoadLineKind.ADMITTED, elapsed, answer.token, answer.run)
        instance = self.daemon.scheduler.by_run(answer.run)
        if instance is None:  # it has ended before this line was written
            return line
        checkpoint, kind = instance.record.checkpoint(), self.daemon.card.kind
        cards = self._cards()
        on_cards = (share.where for share in instance.record.shares(self.daemon.card.uuid))
        plan = plan_view(
            checkpoint,
            answer.facts,
            instance.plan,
            answer.budget,
            argv=answer.argv,
            card_kind=kind,
            parts=parts_of(instance.plan, cards, tuple(where for where in on_cards if where != HOST)),
            environment=answer.environment,
        )
        return line.model_copy(update={"plan": plan})

    def _line(self, kind: LoadLineKind, elapsed: float, token: str, run: str) -> LoadLine:
        instance = self.daemon.scheduler.by_run(run)
        return LoadLine(
            kind=kind,
            elapsed_s=elapsed,
            token=token,
            state=instance.state if instance else None,
            instance=self.instance_view(instance) if instance else None,
        )

    async def unload(self, request: web.Request) -> web.Response:
        """``POST /v1/unload``: answers when the memory is back."""
        return _json(await self.unloaded(await _body(request, UnloadBody)))

    async def unloaded(self, body: UnloadBody) -> Unloaded:
        """Have a model unloaded. Raises LlmError NOT_LOADED, STOP_FAILED."""
        began = time.monotonic()
        done = await self.daemon.unload(body.model, drain_s=body.drain_s, force=body.force)
        return Unloaded(
            name=done.name,
            run=done.run,
            released_bytes=done.released_bytes,
            elapsed_s=round(time.monotonic() - began, 4),
            waited=done.waited,
            unfinished=done.unfinished,
            problem=_problem(done.problem),
        )

    async def release(self, request: web.Request) -> web.Response:
        """``POST /v1/release``: unload everything, answers when the memory is back."""
        return _json(await self.released(await _body(request, ReleaseBody)))

    async def released(self, body: ReleaseBody) -> Released:
        """Have everything unloaded. Raises LlmError STOP_FAILED."""
        began = time.monotonic()
        was_released = self.daemon.scheduler.released
        done = await self.daemon.release(until_resume=body.until_resume)
        return Released(
            names=done.names,
            released_bytes=done.released_bytes,
            until_resume=body.until_resume,
            was_released=was_released,
            elapsed_s=round(time.monotonic() - began, 4),
            foreign_units=self.daemon.foreign_units.names,
            problem=_problem(done.problem),
        )

    async def resume(self, request: web.Request) -> web.Response:
        """``POST /v1/resume``: loads are welcome again."""
        await _body(request, ResumeBody)
        return _json(Resumed(was_released=await self.daemon.resume()))

    async def pin(self, request: web.Request) -> web.Response:
        """``POST /v1/models/{name}/pin``: whether a loaded model may go to make room."""
        body = await _body(request, PinBody)
        instance = await self.daemon.pin(request.match_info["name"], pinned=body.pinned)
        return _json(Pinned(name=instance.name, run=instance.run, pinned=body.pinned))

    async def reset(self, request: web.Request) -> web.Response:
        """``POST /v1/models/{name}/reset``: start a model again that failed or stays down."""
        await _body(request, ResetBody)
        done = await self.daemon.reset(request.match_info["name"])
        return _json(Reset(name=done.name, run=done.run, starts=done.starts))

    async def cancel(self, request: web.Request) -> web.Response:
        """``POST /v1/cancel``: withdraw a load by its token."""
        body = await _body(request, CancelBody)
        done = await self.daemon.cancel(body.token)
        return _json(Cancelled(token=done.load_token, stopped=done.stopped))

    # --- streaming -----------------------------------------------------------------------------------------

    async def _stream(
        self, request: web.Request, lines: AsyncGenerator[BaseModel, None]
    ) -> web.StreamResponse:
        """One JSON document a line, as soon as it exists. A client that leaves ends only its own stream.

        HEAD has the head of the answer and no line, though aiohttp would follow as long as for GET.
        """
        response = web.StreamResponse(headers={"Content-Type": NDJSON, "Cache-Control": "no-store"})
        await response.prepare(request)
        try:
            async with contextlib.aclosing(lines):
                if request.method == hdrs.METH_HEAD:
                    return response
                async for line in lines:
                    await response.write(line.model_dump_json(exclude_none=True).encode() + b"\n")
        except LlmError as error:
            # The status has been sent; the last line tells.
            await response.write(_problem_line(error))
        except (ConnectionError, asyncio.CancelledError):
            raise
        except Exception as error:  # noqa: BLE001  # the same edge as in problems(): there a second head would be sent
            await response.write(_problem_line(_unexpected(request, error)))
        await response.write_eof()
        return response
