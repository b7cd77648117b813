"""The D-Bus surface: the contract's methods and properties, answered by what answers the control API."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from lllm3090d.bus.service import BusService, Call, Peer
from lllm3090d.bus.service_contract import JOB, MODEL, path_of_model
from lllm3090d.bus.thread import BusThread
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.serving.actors import CALLER, client
from lllm3090d.surfaces.bodies import Body, validated
from lllm3090d.surfaces.control import ControlApi
from lllm3090d.surfaces.dbus_jobs import Jobs
from lllm3090d.surfaces.dbus_news import News
from lllm3090d.surfaces.dbus_views import (
    budget_of,
    details,
    instances_of,
    manager_state,
    others_of,
    pending_of,
    text_of,
)
from lllm3090d.version import VERSION
from lllm3090d.wire import InspectBody, InstanceView, LoadBody, PlanBody, ReleaseBody, UnloadBody
from lllm3090d.wire_dbus import ListBody, TokenBody

API_VERSION = 2
MOST_OPTIONS = 64
READING = frozenset({"Plan", "ListModels", "ListInstances", "Explain"})


class DbusApi:
    """Objects of the daemon on the user's bus.

    Args:
        api: has the pieces that answer.
        bus: started.
    """

    def __init__(self, api: ControlApi, bus: BusThread) -> None:
        self._api = api
        self._daemon = api.daemon
        self._service = BusService(bus, self)
        self._jobs = Jobs(self._service)
        self._news = News(self._service, api.daemon, self._views, self._announced)
        api.dbus_problem = lambda: self._service.problem

    async def start(self) -> None:
        """Offer everything, then take the name. Never raises; the status says why nobody can call."""
        self._news.start()
        await self._service.start()

    async def end(self) -> None:
        """Take everything away; jobs that have not ended fail, and models go on."""
        self._news.end()
        await self._jobs.end()
        await self._service.close()

    # --- calls --------------------------------------------------------------------------------------------------

    async def call(  # noqa: PLR0911  # one for each method
        self, call: Call, peer: Peer
    ) -> Sequence[Any]:
        """The values that a method gives."""
        CALLER.set(client(peer.uid, peer.pid) if call.member not in READING else None)
        if call.interface == JOB:
            return await self._cancel(call.path)
        arguments = call.arguments
        if call.interface == MODEL:
            arguments = (self._view(call.path).name, *arguments)
        match call.member:
            case "Load":
                return (self._load(*arguments),)
            case "Unload":
                return (self._unload(*arguments),)
            case "Release":
                return (self._release(*arguments),)
            case "Resume":
                return (await self._daemon.resume(),)
            case "Reset":
                done = await self._daemon.reset(_name(*arguments))
                return (done.run, done.starts)
            case "Plan":
                plan = await self._api.previews.plan(_body(PlanBody, arguments[1], arguments[0]))
                return (plan.model_dump_json(),)
            case "ListModels":
                asked = _body(ListBody, arguments[0])
                found = await self._api.listings.models(with_catalogue=asked.catalogue)
                return (
                    await asyncio.to_thread(lambda: [(each.name, details(each)) for each in found.models]),
                )
            case "ListInstances":
                self._daemon.look_at_cards()
                return ([(path_of_model(each.name), details(each)) for each in self._views()],)
            case "Explain":
                explained = await self._api.memory.explained(_name(*arguments))
                return (explained.model_dump_json(),)
        raise LlmError(ErrorCode.NO_SUCH_ROUTE, f"{call.interface} has no method {call.member}")

    def _load(self, model: str, options: Mapping[str, Any]) -> str:
        body = _body(LoadBody, options, model)
        token = body.token or secrets.token_hex(8)
        self._jobs.check(token)
        return self._jobs.load(model, token, self._api.loading(body.model_copy(update={"token": token})))

    def _unload(self, model: str, options: Mapping[str, Any]) -> str:
        token, rest = self._token(options)
        body = _body(UnloadBody, rest, model)
        return self._jobs.other("unload", model, token, self._api.unloaded(body))

    def _release(self, options: Mapping[str, Any]) -> str:
        token, rest = self._token(options)
        body = _body(ReleaseBody, rest)
        return self._jobs.other("release", "", token, self._api.released(body))

    def _token(self, options: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
        """The token of a job, and the options beside it."""
        given = {key: value for key, value in options.items() if key == "token"}
        token = _body(TokenBody, given).token or secrets.token_hex(8)
        self._jobs.check(token)
        return token, {key: value for key, value in options.items() if key != "token"}

    async def _cancel(self, path: str) -> tuple[()]:
        job = self._jobs.of(path)
        if job.kind != "load":
            raise LlmError(
                ErrorCode.INVALID_REQUEST,
                f"a job of the kind {job.kind} cannot be withdrawn",
                hint="Load again what it unloads.",
            )
        await self._daemon.cancel(job.token)
        return ()

    # --- properties ---------------------------------------------------------------------------------------------

    async def properties(self, path: str, interface: str, names: Collection[str]) -> Mapping[str, Any]:
        """At least these properties of an object."""
        if interface == JOB:
            return self._jobs.of(path).properties()
        if interface == MODEL:
            return self._news.model(path)
        told = {"Version": VERSION, "ApiVersion": API_VERSION, **self._news.manager()}
        told["Cards"] = [(each.card.uuid, each.card.name, each.card.kind) for each in self._daemon.readers]
        if not {"Budget", "Others"}.isdisjoint(names):
            await self._daemon.look_for_desktop()
            gpus = self._api.memory.gpus_now()
            told |= {"Budget": budget_of(gpus), "Others": others_of(gpus)}
        return told

    def _announced(self) -> dict[str, Any]:
        """The properties of the manager that tell of their changes."""
        scheduler, views = self._daemon.scheduler, self._views()
        pending = self._api.pending_views()
        return {
            "State": manager_state(
                (each.state for each in views), len(pending), released=scheduler.released
            ),
            "Instances": instances_of(views),
            "Pending": pending_of(pending),
            "Wanted": [each.name for each in self._daemon.wanted.wants],
            "Released": scheduler.released,
        }

    def _views(self) -> tuple[InstanceView, ...]:
        return self._api.instance_views()

    def _view(self, path: str) -> InstanceView:
        for instance in self._daemon.scheduler.instances:
            if path_of_model(instance.name) == path:
                return self._api.instance_view(instance)
        raise LlmError(ErrorCode.NOT_LOADED, f"the model of {path} is not loaded any more")

    def error_text(self, error: LlmError) -> str:
        """Message, arithmetic and hint."""
        return text_of(error.problem())


def _name(model: str) -> str:
    """A model's name that is not absurd. Raises LlmError INVALID_REQUEST."""
    return _body(InspectBody, {}, model).model or ""


def _body(kind: type[Body], options: Mapping[str, Any], model: str | None = None) -> Body:
    """A request of the control API, from the arguments of a call. Raises LlmError INVALID_REQUEST."""
    if len(options) > MOST_OPTIONS:
        raise LlmError(
            ErrorCode.INVALID_REQUEST,
            f"{len(options)} options are too many",
            hint=f"Known options: {', '.join(_known(kind))}.",
        )
    if "model" in options:
        raise LlmError(
            ErrorCode.INVALID_REQUEST,
            "model is no option",
            hint="It is an argument of its own, or the object.",
        )
    try:
        text = json.dumps({**options, **({} if model is None else {"model": model})}, allow_nan=False)
    except ValueError as error:
        raise LlmError(
            ErrorCode.INVALID_REQUEST, "an option is not a number, or infinite", hint="Leave it out."
        ) from error
    return validated(text, kind)


def _known(kind: type[Body]) -> list[str]:
    return [name for name in kind.model_fields if name != "model"]
