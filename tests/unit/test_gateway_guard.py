"""Who may ask: pages of other origins, lured names, keys."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from multidict import CIMultiDict

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gateway.guard import Rules, check, cors_headers, digest, host_name, origin_fault
from lllm3090d.gateway.port import Address, bind
from tests.fakes.gateway_world import GatewayWorld
from tests.unit.test_gateway_wire import ASK, CHAT, answering, play, whole

pytestmark = pytest.mark.unit

PAGE = "https://evil.example"
ALLOWED = "http://localhost:3000"
LIKE_NAMES = [
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "127.0.0.1@evil.example",
    "127.0.0.1:1919:80",
]


def verdict(headers: dict[str, str], rules: Rules) -> ErrorCode | None:
    try:
        check(CIMultiDict(headers), rules)
    except LlmError as error:
        return error.code
    return None


@pytest.mark.parametrize(
    "host", ["127.0.0.1:1919", "localhost:1919", "LOCALHOST", "[::1]:1919", "[::1]", "localhost."]
)
def test_names_of_this_machine(host: str) -> None:
    assert verdict({"Host": host}, Rules()) is None


@pytest.mark.parametrize("host", ["", "evil.example:1919", "192.168.0.9", "[::2]", "::1", *LIKE_NAMES])
def test_a_name_that_was_made_to_resolve_here_is_refused(host: str) -> None:
    assert verdict({"Host": host}, Rules()) is ErrorCode.FOREIGN_ORIGIN
    assert verdict({}, Rules()) is ErrorCode.FOREIGN_ORIGIN


def test_further_names_and_pages_are_those_of_the_settings() -> None:
    rules = Rules(hosts=frozenset({"box.lan"}), origins=frozenset({ALLOWED}))
    assert verdict({"Host": "Box.lan:1919"}, rules) is None
    assert verdict({"Host": "localhost", "Origin": ALLOWED}, rules) is None
    assert verdict({"Host": "localhost", "Origin": PAGE}, rules) is ErrorCode.FOREIGN_ORIGIN
    assert verdict({"Host": "localhost", "Origin": PAGE}, Rules(origins=frozenset({"*"}))) is None


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": PAGE},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://localhost:1920"},
        {"Origin": "http://localhost:1919.evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "Same-Site"},
        {"Sec-Fetch-Site": "cross-origin"},  # whatever comes to be said of pages
        {"Sec-Fetch-Site": ""},
        {"Origin": "http://localhost:1919", "Host": "evil.example"},
        {"Origin": "http://127.0.0.1:1919"},
        {"Origin": "https://localhost:1919"},
    ],
)
def test_a_page_of_another_origin_is_refused(headers: dict[str, str]) -> None:
    assert verdict({"Host": "localhost:1919"} | headers, Rules()) is ErrorCode.FOREIGN_ORIGIN


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://localhost:1919"}, {"Sec-Fetch-Site": "none"}, {"Sec-Fetch-Site": "same-origin"}],
)
def test_a_person_and_our_own_page_may_ask(headers: dict[str, str]) -> None:
    assert verdict({"Host": "localhost:1919"} | headers, Rules()) is None


@pytest.mark.parametrize(
    ("headers", "may"),
    [
        ({}, False),
        ({"Authorization": "Bearer right"}, True),
        ({"Authorization": "bearer  right"}, True),
        ({"x-api-key": "right"}, True),
        ({"x-api-key": "other"}, True),
        ({"Authorization": "Basic right"}, False),
        ({"Authorization": "Bearer "}, False),
        ({"Authorization": "Bearer wrong", "x-api-key": "right"}, True),
        ({"x-api-key": digest("right")}, False),
        ({"x-api-key": "\udcff"}, False),
        ({"Authorization": "Bearer \udcff\udcfe"}, False),
    ],
)
def test_keys(headers: dict[str, str], may: bool) -> None:
    rules = Rules(key_digests=(digest("right"), digest("other")))
    assert verdict({"Host": "localhost"} | headers, rules) is (None if may else ErrorCode.API_KEY_WRONG)


@pytest.mark.parametrize(
    ("host", "name"),
    [("a:1", "a"), ("a:", "a:"), ("[::1]:1", "[::1]"), ("[::1]", "[::1]"), ("a:b", "a:b"), ("A.", "a")],
)
def test_the_name_in_a_host_header(host: str, name: str) -> None:
    assert host_name(host) == name


@pytest.mark.parametrize("origin", ["localhost:3000", "http://a/b", "http://", "a", "http://a?b"])
def test_what_is_no_origin(origin: str) -> None:
    assert origin_fault(origin)
    assert origin_fault(ALLOWED) is None and origin_fault("*") is None


def test_a_page_is_told_what_it_may_read_and_nobody_else() -> None:
    assert cors_headers(CIMultiDict({"Host": "localhost"}), Rules()) == {}
    asked = CIMultiDict({"Origin": ALLOWED, "Access-Control-Request-Method": "POST"})
    told = cors_headers(asked, Rules(origins=frozenset({ALLOWED})))
    assert told["Access-Control-Allow-Origin"] == ALLOWED and told["Vary"] == "Origin"
    assert "POST" in told["Access-Control-Allow-Methods"]


@pytest.mark.parametrize(
    ("host", "good"),
    [
        *[(each, True) for each in ("192.168.0.9:1919", "10.0.0.1", "[fe80::1]:1919", "[::2]")],
        *[
            (each, False)
            for each in ("evil.example", "::2", "[fe80::1%25eth0]", "[fe80::1%eth0]", "[10.0.0.1]")
        ],
        *[(each, False) for each in ("10.1", "0x7f.1", "localhost.evil", "10.0.0.1.evil.example")],
    ],
)
def test_with_a_key_any_address_names_this_machine_but_no_other_name_does(host: str, good: bool) -> None:
    headers = {"Host": host, "x-api-key": "right"}
    rules = Rules(key_digests=(digest("right"),))
    assert (verdict(headers, rules) is None) is good
    assert verdict(headers, Rules()) is ErrorCode.FOREIGN_ORIGIN


def test_without_any_key_nobody_is_let_in_where_one_is_needed() -> None:
    headers = {"Host": "localhost", "x-api-key": ""}
    assert verdict(headers, Rules(needs_key=True)) is ErrorCode.API_KEY_WRONG


def test_a_page_that_may_ask_is_let_through_to_a_private_address() -> None:
    asked = {"Origin": ALLOWED, "Access-Control-Request-Method": "POST"}
    private = asked | {"Access-Control-Request-Private-Network": "true"}
    rules = Rules(origins=frozenset({ALLOWED}))
    assert "Access-Control-Allow-Private-Network" not in cors_headers(CIMultiDict(asked), rules)
    assert cors_headers(CIMultiDict(private), rules)["Access-Control-Allow-Private-Network"] == "true"


def test_through_the_port(tmp_path: Path) -> None:
    rules = Rules(origins=frozenset({ALLOWED}), key_digests=(digest("right"),))

    async def story(world: GatewayWorld, session: aiohttp.ClientSession) -> None:
        async def ask(method: str = "POST", **headers: str) -> aiohttp.ClientResponse:
            sent = {name.replace("_", "-"): text for name, text in headers.items()}
            async with session.request(method, world.address + CHAT, json=ASK, headers=sent) as answer:
                await answer.read()
                return answer

        assert (await ask()).status == 401
        assert (await ask(x_api_key="right")).status == 200
        refused = await ask(x_api_key="right", Origin=PAGE)
        assert refused.status == 403 and "Access-Control-Allow-Origin" not in refused.headers
        assert (await ask(x_api_key="right", Host="evil.example")).status == 403
        allowed = await ask(x_api_key="right", Origin=ALLOWED)
        assert allowed.status == 200 and allowed.headers["Access-Control-Allow-Origin"] == ALLOWED
        # A page must be able to read why it is refused.
        assert (await ask(Origin=ALLOWED)).headers["Access-Control-Allow-Origin"] == ALLOWED
        before = await ask("OPTIONS", Origin=ALLOWED, Access_Control_Request_Method="POST")
        assert before.status == 204 and "POST" in before.headers["Access-Control-Allow-Methods"]
        assert (await ask("OPTIONS", Origin=PAGE, Access_Control_Request_Method="POST")).status == 403
        assert len(world.house.engines["small"].asked) == 2
        assert "right" not in repr(world.records)

    play(tmp_path, answering(whole(b"{}")), story, rules=rules)


def test_other_machines_need_a_key() -> None:
    with pytest.raises(LlmError, match="no key is asked for") as caught:
        bind(Address("0.0.0.0", 0), has_keys=False)  # noqa: S104  # what is refused
    assert caught.value.code is ErrorCode.GATEWAY_UNAVAILABLE
    bind(Address("0.0.0.0", 0), has_keys=True).close()  # noqa: S104  # with a key it is meant


def test_a_port_that_is_taken_is_told() -> None:
    with bind(Address("127.0.0.1", 0), has_keys=False) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LlmError, match=f"127.0.0.1:{port} cannot be listened on"):
            bind(Address("127.0.0.1", port), has_keys=False)
    with pytest.raises(LlmError, match="cannot be listened on"):
        bind(Address("192.0.2.1", 0), has_keys=True)


def test_a_head_that_never_ends_is_given_up(tmp_path: Path) -> None:
    async def story(world: GatewayWorld, _: aiohttp.ClientSession) -> None:
        host, port = world.address.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST " + CHAT.encode() + b" HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"y" * 100_000)
        answer = await reader.read()
        writer.close()
        assert answer.startswith(b"HTTP/1.0 400") or answer.startswith(b"HTTP/1.1 400")

    play(tmp_path, answering(whole(b"{}")), story)
