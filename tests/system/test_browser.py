"""Pages in Debian's Chromium against the gateway: those of other origins make it do nothing, and an allowed one can.

Skipped where there is no Chromium: its installation takes longer than all other tests of the gateway. make test-browser
installs it first.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from lllm3090d.gateway.guard import Rules
from lllm3090d.gateway.record import Outcome
from tests.fakes.gateway_world import Asked, GatewayWorld, gateway_world

pytestmark = pytest.mark.system

LIMIT_S = 60.0
CHROMIUM = shutil.which("chromium")
# What a page that may run scripts can try, to each way of writing the gateway's address.
SCRIPT = """
const told = {};
const body = JSON.stringify({model: "small", messages: []});
const chat = "/v1/chat/completions", look = "/upstream/small/props";
const within = (promise) => Promise.race([promise, new Promise((done) => setTimeout(() => done("nothing"), 4000))]);
async function attempt(name, work) {
  try { told[name] = String(await within(work())); } catch (error) { told[name] = "refused: " + error.name; }
}
function loaded(element, source, attribute) {
  return new Promise((done) => {
    element.onload = () => done("loaded");
    element.onerror = () => done("refused");
    element[attribute] = source;
    document.body.appendChild(element);
  });
}
async function text(url, options) {
  const answer = await fetch(url, options);
  return answer.status + " " + await answer.text();
}
(async () => {
  for (const at of TARGETS) {
    const simple = {method: "POST", body, headers: {"Content-Type": "text/plain"}};
    const json = {...simple, headers: {"Content-Type": "application/json"}};
    await attempt(at + " json", () => text(at + chat, json));
    await attempt(at + " text", () => text(at + chat, simple));
    await attempt(at + " key", () => text(at + chat, {method: "POST", body, headers: {"Authorization": "Bearer x"}}));
    await attempt(at + " opaque", () => text(at + chat, {...simple, mode: "no-cors"}));
    await attempt(at + " beacon", () => navigator.sendBeacon(at + chat, body));
    await attempt(at + " get", () => text(at + look));
    await attempt(at + " opaque get", () => text(at + look, {mode: "no-cors"}));
    await attempt(at + " image", () => loaded(new Image(), at + look, "src"));
    await attempt(at + " script", () => loaded(document.createElement("script"), at + look, "src"));
    await attempt(at + " frame", () => loaded(document.createElement("iframe"), at + look, "src"));
    await attempt(at + " events", () => new Promise((done) => {
      const events = new EventSource(at + look);
      events.onopen = () => done("open");
      events.onerror = () => { events.close(); done("refused"); };
    }));
    await attempt(at + " socket", () => new Promise((done) => {
      const socket = new WebSocket(at.replace("http", "ws") + look);
      socket.onopen = () => done("open");
      socket.onerror = () => done("refused");
    }));
    for (const type of ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]) {
      await attempt(at + " form " + type, () => new Promise((done) => {
        const frame = document.createElement("iframe"), form = document.createElement("form");
        frame.name = "f" + Math.random(); form.target = frame.name;
        form.method = "POST"; form.action = at + chat; form.enctype = type;
        const field = document.createElement("input");
        field.name = '{"model":"small","messages":[],"x":"'; field.value = '"}';
        form.appendChild(field);
        document.body.append(frame, form);
        frame.onload = () => done("answered");
        form.submit();
      }));
    }
  }
  await fetch("/told", {method: "POST", body: JSON.stringify(told)});
})();
"""
ATTEMPTS = 15


class Pages:
    """A web server with one page; any name leads to it."""

    def __init__(self) -> None:
        self.targets: list[str] = []
        self.told: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/", self.page), web.post("/told", self.tell)])
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        ((_, self.port),) = self._runner.addresses

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def page(self, _: web.Request) -> web.Response:
        """The page with its script."""
        script = SCRIPT.replace("TARGETS", json.dumps(self.targets))
        return web.Response(
            text=f"<!doctype html><meta charset=utf-8><body><script>{script}</script>",
            content_type="text/html",
        )

    async def tell(self, request: web.Request) -> web.Response:
        """What became of each attempt."""
        self.told.set_result(await request.json())
        return web.Response()


async def respond(_: Asked, writer: asyncio.StreamWriter) -> None:
    """Any engine's answer."""
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")


@contextlib.asynccontextmanager
async def browser(profile: Path, url: str) -> Any:
    """Chromium shows a page. Every name leads to this machine, as a lured one would."""
    assert CHROMIUM is not None
    options = [
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"),
        *("--disable-background-networking", "--disable-component-update", "--no-proxy-server"),
        # What the browser itself keeps pages from is not what is tested here.
        "--disable-features=LocalNetworkAccessChecks,BlockInsecurePrivateNetworkRequests",
        "--host-resolver-rules=MAP *.example 127.0.0.1",
        f"--user-data-dir={profile}",
        url,
    ]
    quiet = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(CHROMIUM, *options, stdout=quiet, stderr=quiet)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def shown(tmp_path: Path, world: GatewayWorld, pages: Pages, host: str) -> dict[str, str]:
    """What a page at this host could do."""
    async with browser(tmp_path / "profile", f"http://{host}:{pages.port}/"):
        return await pages.told


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium here; install it with: make test-browser")
@pytest.mark.parametrize("allowed", [False, True])
def test_pages(tmp_path: Path, allowed: bool) -> None:
    async def run() -> None:
        pages = Pages()
        await pages.start()
        page = f"http://evil.example:{pages.port}"
        rules = Rules(origins=frozenset({page} if allowed else ()))
        try:
            async with (
                asyncio.timeout(LIMIT_S),
                gateway_world(tmp_path, respond, rules=rules, loaded=False) as world,
            ):
                port = world.address.rpartition(":")[2]
                here = f"http://127.0.0.1:{port}"
                # The last two as names that resolve to this machine by now: the page's own, and another one.
                pages.targets = [
                    here,
                    f"http://localhost:{port}",
                    f"http://evil.example:{port}",
                    f"http://lured.example:{port}",
                ][: 1 if allowed else 4]
                told = await shown(tmp_path, world, pages, "evil.example")
                check(told, world, here, allowed=allowed)
        finally:
            await pages.close()

    asyncio.run(run())


def check(told: dict[str, str], world: GatewayWorld, here: str, *, allowed: bool) -> None:
    asked = world.house.engines["small"].asked
    if allowed:
        for kind in ("json", "text", "key", "get"):
            assert told[f"{here} {kind}"] == "200 {}", told
        assert world.house.loads == ["small"] and asked
        # Whoever has no say in its headers has no Origin either, or one that may.
        assert told[f"{here} image"] == "refused"
        return
    assert len(told) == 4 * ATTEMPTS
    assert not asked and not world.house.loads and not world.house.leases
    # Each attempt has come to us: it is we who have refused it.
    assert len(world.records) >= 4 * (ATTEMPTS - 2)
    assert {each.outcome for each in world.records} == {Outcome.REFUSED}
    assert {each.code for each in world.records} == {"foreign_origin"}
    assert not [each for each in told.values() if each.startswith("200") or each == "open"], told
