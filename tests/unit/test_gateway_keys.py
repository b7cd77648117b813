"""Keys of the gateway: their file, and where it listens with and without them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import pytest
from aiohttp import web

from lllm3090d import wire
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.door import Door
from lllm3090d.gateway.guard import digest
from lllm3090d.gateway.keys import FILE_NAME, MOST_KEYS, PREFIX, Keys
from lllm3090d.gateway.port import Address, bind
from lllm3090d.gateway.service import GatewayService
from lllm3090d.serving.daemon import Daemon
from lllm3090d.surfaces.control import ControlApi
from tests.fakes.control_server import ControlServer, ctl

pytestmark = pytest.mark.unit
LIMIT_S = 60.0
HERE, OPEN = "127.0.0.1", "0.0.0.0"  # noqa: S104  # what is refused without a key


def test_a_key_is_told_once_and_kept_as_its_digest(tmp_path: Path) -> None:
    keys = Keys(tmp_path / "state")
    keys.read()
    assert keys.listed == () and keys.problem is None
    made, secret = keys.add("laptop")
    assert secret.startswith(PREFIX) and len(bytes.fromhex(secret.removeprefix(PREFIX))) == 32
    assert keys.digests == (digest(secret),) == (made.digest,)
    file = tmp_path / "state" / FILE_NAME
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert secret.removeprefix(PREFIX) not in file.read_text()
    _, other = keys.add("phone")
    assert other != secret
    again = Keys(tmp_path / "state")
    again.read()
    assert [key.name for key in again.listed] == ["laptop", "phone"]
    assert again.digests == keys.digests
    again.remove("laptop")
    assert again.digests == (digest(other),)
    assert list((tmp_path / "state").iterdir()) == [file]


@pytest.mark.parametrize("name", ["", "a b", "-a", "a/b", "a\n", "x" * 65, "ä", "\x1b[2J"])
def test_what_is_no_name(tmp_path: Path, name: str) -> None:
    keys = Keys(tmp_path)
    with pytest.raises(LlmError) as caught:
        keys.add(name)
    assert caught.value.code is ErrorCode.INVALID_REQUEST and not keys.digests


def test_names_are_taken_once_and_must_be_there(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    keys.add("a")
    for refused in (lambda: keys.add("a"), lambda: keys.remove("b")):
        with pytest.raises(LlmError) as caught:
            refused()
        assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert len(keys.listed) == 1


def test_there_are_not_any_number(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    rows = [{"name": f"k{each}", "digest": "0" * 64, "made": "t"} for each in range(MOST_KEYS)]
    (tmp_path / FILE_NAME).write_text(json.dumps({"version": 1, "keys": rows}))
    keys.read()
    with pytest.raises(LlmError, match="all there may be"):
        keys.add("more")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"version": 2, "keys": []}',
        b'{"keys": [{"name": "a", "digest": "lllm3090_secret", "made": "t"}]}',
        b"\xff",
        b" " * (1 << 19),
    ],
)
def test_a_file_that_is_not_understood_lets_nobody_in(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    keys = Keys(tmp_path)
    keys.read()
    assert keys.problem is not None and keys.problem.code is ErrorCode.STATE_UNUSABLE
    assert "secret" not in keys.problem.message
    with pytest.raises(LlmError, match="cannot be read"):
        keys.add("a")
    assert (tmp_path / FILE_NAME).read_bytes() == content
    (tmp_path / FILE_NAME).unlink()
    keys.read()
    assert keys.problem is None


def test_no_file_in_its_place_holds_up_the_start(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / FILE_NAME)
    keys = Keys(tmp_path)
    keys.read()
    assert keys.problem is not None and "no regular file" in keys.problem.message


def test_what_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("in the way")
    keys = Keys(tmp_path / "state")
    with pytest.raises(LlmError) as caught:
        keys.add("a")
    assert caught.value.code is ErrorCode.STATE_UNUSABLE and not keys.digests


# --- where it listens -------------------------------------------------------------------------------------------


class Answering:
    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Anything is fine."""
        return web.Response(text=request.path)


async def status_at(address: Address) -> int | None:
    target = f"http://{HERE}:{address.port}/x"
    try:
        async with aiohttp.ClientSession() as session, session.get(target) as answer:
            await answer.read()
            return answer.status
    except aiohttp.ClientConnectionError:
        return None


def where(made: Door | GatewayService) -> Address | None:
    return made.address


def trouble(made: Door) -> LlmError | None:
    return made.problem


def door(story: Callable[[Door], Awaitable[None]], passed: socket.socket | None = None) -> None:
    async def run() -> None:
        made = Door(Answering(), passed)
        async with asyncio.timeout(LIMIT_S):
            try:
                await story(made)
            finally:
                await made.close()

    asyncio.run(run())


def test_an_address_for_others_is_open_only_while_there_is_a_key() -> None:
    async def story(made: Door) -> None:
        await made.set(Address(OPEN, 0), has_keys=False)
        problem = trouble(made)
        assert where(made) is None and problem is not None
        assert problem.code is ErrorCode.GATEWAY_UNAVAILABLE and "key add" in (problem.hint or "")
        await made.set(Address(OPEN, 0), has_keys=True)
        address = where(made)
        assert address is not None and trouble(made) is None
        assert await status_at(address) == 200
        await made.set(Address(OPEN, 0), has_keys=True)
        assert where(made) == address  # nothing is cut for nothing
        await made.set(Address(OPEN, 0), has_keys=False)
        assert where(made) is None and await status_at(address) is None

    door(story)


def test_keys_that_cannot_be_read_keep_it_shut() -> None:
    async def story(made: Door) -> None:
        await made.set(Address(HERE, 0), has_keys=False)
        address = where(made)
        assert address is not None
        unknown = LlmError(ErrorCode.STATE_UNUSABLE, "The keys cannot be read.", hint="Correct that.")
        await made.set(Address(HERE, 0), has_keys=False, unknown=unknown)
        assert where(made) is None and trouble(made) is unknown and await status_at(address) is None
        await made.set(Address(HERE, 0), has_keys=False)
        assert where(made) is not None and trouble(made) is None

    door(story)


def test_a_port_that_was_taken_is_tried_again() -> None:
    taken = bind(Address(HERE, 0), has_keys=False)
    wanted = Address(HERE, taken.getsockname()[1])

    async def story(made: Door) -> None:
        await made.set(wanted, has_keys=False)
        problem = trouble(made)
        assert problem is not None and "ss -ltnp" in (problem.hint or "")
        taken.close()
        await made.set(wanted, has_keys=False)
        assert where(made) == wanted and trouble(made) is None

    door(story)


def test_a_socket_of_systemd_is_answered_even_while_there_is_no_gateway() -> None:
    with bind(Address(HERE, 0), has_keys=False) as passed:
        held = Address(HERE, passed.getsockname()[1])

        async def story(made: Door) -> None:
            await made.set(None, has_keys=False)
            assert where(made) is None and trouble(made) is None
            assert await status_at(held) == 503
            await made.set(held, has_keys=False)
            assert where(made) == held and await status_at(held) == 200
            elsewhere = Address(HERE, held.port - 1)
            await made.set(elsewhere, has_keys=False)
            # systemd has it where it has it; that the settings say otherwise is told.
            problem = trouble(made)
            assert where(made) == held and problem is not None and str(elsewhere) in problem.message
            assert await status_at(held) == 200
            await made.set(None, has_keys=False)
            assert await status_at(held) == 503

        door(story, passed)
        assert passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)  # it is systemd's still


def test_a_socket_of_systemd_for_others_needs_a_key_too() -> None:
    with bind(Address(OPEN, 0), has_keys=True) as passed:
        held = Address(OPEN, passed.getsockname()[1])

        async def story(made: Door) -> None:
            await made.set(held, has_keys=False)
            assert where(made) is None and await status_at(held) == 503
            await made.set(held, has_keys=True)
            assert where(made) == held and await status_at(held) == 200

        door(story, passed)


# --- through the daemon -----------------------------------------------------------------------------------------


def test_through_the_control_api(tmp_path: Path) -> None:
    """Made, listed, asked for and removed; each takes effect at once, and no answer or event tells a key again."""
    told: list[str] = []
    settings = SimpleNamespace(
        state_dir=tmp_path,
        gateway=True,
        gateway_address=HERE,
        gateway_port=0,
        gateway_hosts="",
        gateway_origins="",
        gateway_access_log=False,
        requests_days=1,
        requests_kept=1,
    )
    daemon = SimpleNamespace(
        settings=settings,
        scheduler=SimpleNamespace(instances=()),
        lookup=SimpleNamespace(store=lambda: None),
        history=SimpleNamespace(add=lambda _kind, message: told.append(message)),
    )

    async def run() -> None:
        service = GatewayService(cast(Daemon, daemon), cast(Any, None))
        api = ControlApi(cast(Daemon, daemon), "252")
        runner = web.AppRunner(api.application(), access_log=None)
        await runner.setup()
        try:
            await web.UnixSite(runner, str(tmp_path / "s")).start()
            connector = aiohttp.UnixConnector(str(tmp_path / "s"))
            async with asyncio.timeout(LIMIT_S), aiohttp.ClientSession(connector=connector) as session:

                async def post(path: str, body: object) -> tuple[int, Any]:
                    async with session.post(f"http://d/v1/keys/{path}", json=body) as answer:
                        return answer.status, await answer.json()

                assert (await post("add", {"name": "a"}))[0] == 503  # it starts
                api.gateway = service
                await service.start()
                assert service.rules().key_digests == () and not service.rules().needs_key
                status, made = await post("add", {"name": "laptop"})
                assert status == 200 and service.rules().key_digests == (digest(made["key"]),)
                assert (await post("add", {"name": "laptop"}))[0] == 422
                assert (await post("add", {"name": "a b"}))[0] == 422
                assert (await post("remove", {"name": "b"}))[0] == 422
                async with session.get("http://d/v1/keys") as answer:
                    listed = await answer.json()
                assert [each["name"] for each in listed["keys"]] == ["laptop"]
                address = where(service)
                assert address is not None
                assert await health(address, "") == 401
                assert await health(address, made["key"]) == 200
                assert made["key"] not in f"{listed}{told}" and digest(made["key"]) not in f"{listed}{told}"
                # For others: open with the key, and shut with the last one gone.
                settings.gateway_address = OPEN
                await service.start()
                address = where(service)
                assert address is not None and await health(address, made["key"]) == 200
                service.keys.remove("laptop")
                assert await health(address, "") == 401  # not even before it is shut
                service.keys.add("again")
                assert (await post("remove", {"name": "again"})) == (200, {"keys": []})
                assert where(service) is None and await status_at(address) is None
                assert len(told) == 2
        finally:
            await service.close()
            await runner.cleanup()

    asyncio.run(run())


async def health(address: Address, key: str) -> int:
    headers = {"x-api-key": key} if key else {}
    target = f"http://{HERE}:{address.port}/health"
    async with aiohttp.ClientSession() as session, session.get(target, headers=headers) as answer:
        return answer.status


def test_the_client_shows_a_key_once() -> None:
    view = wire.KeyView(name="laptop", made="2026-11-30T21:00:00.000Z")
    made = wire.KeyMade(name="laptop", made=view.made, key=PREFIX + "0" * 64)
    listing = wire.KeysView(keys=(view,))
    with ControlServer(add=made, keys=listing, remove=wire.KeysView(keys=())) as server:
        shown = ctl(server, "key", "add", "laptop")
        assert shown.output.splitlines()[0] == made.key and shown.exit_code == 0
        assert server.next_request().body == wire.KeyBody(name="laptop")
        listed = ctl(server, "key", "list").output
        assert "laptop" in listed and view.made in listed and PREFIX not in listed
        removed = ctl(server, "key", "remove", "laptop").output
        assert "lets nobody in any more" in removed and "none is asked for" in removed
