"""The D-Bus API on a real session bus: what a desktop program sees of the daemon, and nothing else is used."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import Any

import pytest
from gi.repository import Gio, GLib

from lllm3090d.bus import service_gio
from lllm3090d.bus.messages import RemoteError, Target
from lllm3090d.bus.service import MOST_BYTES
from lllm3090d.bus.service_contract import (
    BUS_NAME,
    FILE,
    JOB,
    MANAGER,
    MODEL,
    OBJECT_MANAGER,
    ROOT,
    path_of_job,
    path_of_model,
    text,
)
from lllm3090d.bus.thread import BusThread
from lllm3090d.errors import KINDS, ErrorCode
from lllm3090d.version import VERSION
from tests.system.conftest import PRIVATE_MANAGER
from tests.system.dbus_scene import CallError, Client, activatable
from tests.system.harness import DAEMON_UNIT, REPOSITORY, SOCKET_UNIT, eventually, properties, systemctl
from tests.system.rig import Rig, rigged
from tests.system.scenes import PrivateBus, on

pytestmark = pytest.mark.system

ODD = "2b-ä"
MODELS = {"alpha": 1.0, ODD: 1.0}
EXAMPLE = REPOSITORY / "docs" / "how-to" / "dbus_client.py"
STORM = REPOSITORY / "bench" / "dbus_storm.py"
INVALID = KINDS[ErrorCode.INVALID_REQUEST].dbus_name


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """One daemon for all tests."""
    if os.environ.get(PRIVATE_MANAGER) != "1":
        pytest.skip("needs a private user manager; run: make test-system")
    with rigged(tmp_path_factory.mktemp("rig"), MODELS, {"drain_s": "0"}) as made:
        made.add_model("huge", 60.0)
        with activatable():
            yield made


@pytest.fixture
def client() -> Iterator[Client]:
    made = Client()
    yield made
    made.close()


@pytest.fixture
def rig(shared: Rig, client: Client) -> Iterator[Rig]:
    yield shared
    shared.behave(load_held=False)
    assert client.call("Resume") is False
    client.done("Release", "a{sv}", {})
    assert client.get("Instances") == []


def structure(xml: str) -> dict[str, set[tuple[str, ...]]]:
    """Members of each interface, with signatures and directions; annotations beside."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for interface in ET.fromstring(xml).iter("interface"):  # noqa: S314  # of this daemon
        members = found.setdefault(interface.attrib["name"], set())
        for member in interface:
            if member.tag in {"method", "signal"}:
                arguments = [
                    f"{each.get('direction', 'out')} {each.attrib['type']}" for each in member.iter("arg")
                ]
                members.add((member.tag, member.attrib["name"], *arguments))
            elif member.tag == "property":
                notes = [each.attrib["value"] for each in member.iter("annotation")]
                members.add(
                    (
                        member.tag,
                        member.attrib["name"],
                        member.attrib["type"],
                        member.attrib["access"],
                        *notes,
                    )
                )
    return found


def test_the_objects_offer_what_the_contract_says_and_shells_can_read_them(rig: Rig, client: Client) -> None:
    job = client.call("Load", "sa{sv}", ODD, {})
    client.end_of(job)
    contract = structure(FILE.read_text(encoding="utf-8"))
    model = path_of_model(ODD)
    for path, interfaces in ((ROOT, {MANAGER, OBJECT_MANAGER}), (model, {MODEL}), (job, {JOB})):
        offered = structure(
            client.call("Introspect", path=path, interface="org.freedesktop.DBus.Introspectable")
        )
        ours = {name: members for name, members in offered.items() if name in contract}
        assert ours == {name: contract[name] for name in interfaces}
        # Every property can be read, and is of its type.
        for name in interfaces - {OBJECT_MANAGER}:
            known = {member[1] for member in contract[name] if member[0] == "property"}
            assert set(client.get_all(path, name)) == known
        shown = subprocess.run(
            ["busctl", "--user", "introspect", BUS_NAME, path], capture_output=True, text=True, check=True
        ).stdout
        assert all(name in shown for name in interfaces)
        if shutil.which("gdbus"):
            command = ["gdbus", "introspect", "--session", "--dest", BUS_NAME, "--object-path", path]
            assert "readonly" in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert client.get("Version") == VERSION


def test_a_model_is_loaded_and_unloaded_over_d_bus_alone(rig: Rig, client: Client) -> None:
    assert client.get("State") == "idle"
    model = path_of_model("alpha")
    job = client.call("Load", "sa{sv}", "alpha", {"context_tokens": GLib.Variant("u", 8192)})
    _, _, name, (result,) = client.end_of(job)
    assert name == "Completed" and result["object"] == model
    assert (result["name"], result["context_tokens"], result["state"]) == ("alpha", 8192, "ready")
    client.until("JobCompleted", lambda told: told[3][0] == job and told[3][3]["run"] == result["run"])
    # It is what the Unix socket tells, and the object tells the same.
    instance = rig.service.instances()["alpha"]
    seen = client.get_all(model, MODEL)
    for key, value in (
        ("Run", "run"),
        ("State", "state"),
        ("MainPid", "main_pid"),
        ("Endpoint", "endpoint"),
    ):
        assert seen[key] == instance[value]
    (listed,) = client.call("ListInstances")
    assert listed[0] == model and listed[1]["run"] == seen["Run"] and listed[1]["pinned"] is False
    # What was told meanwhile, in order; the job may be over a moment before its last state is told.
    client.until("InstanceStateChanged", lambda told: told[3][2:4] == (seen["Run"], "ready"))
    states = [told[3] for told in client.told if told[2] == "InstanceStateChanged"]
    assert [told[3] for told in states] == ["reserved", "starting", "loading", "ready"]
    assert {told[:3] for told in states} == {(model, "alpha", seen["Run"])}
    names = [told[2] for told in client.told]
    assert (
        names.index("InterfacesAdded") < names.index("InstanceAdded") < names.index("InstanceStateChanged")
    )
    client.until("InstanceAdded", lambda told: told[3] == (model, "alpha", seen["Run"]))
    root = client.changes(ROOT, MANAGER)
    assert root["State"] == ["changing", "serving"]
    assert root["Instances"] == [[model]] and root["Wanted"] == [["alpha"]] and root["Budget"]
    assert client.changes(model, MODEL)["State"][-1] == "ready"
    (card,) = client.get("Budget")
    assert card[3] == seen["ReservedBytes"] and card[4] > 0
    managed = client.call("GetManagedObjects", interface=OBJECT_MANAGER)
    assert managed[model] == {MODEL: seen}
    assert managed[job][JOB]["State"] == "completed" and managed[job][JOB]["Result"] == result

    going = client.call("Unload", "a{sv}", {}, path=model, interface=MODEL)
    _, _, name, (result,) = client.end_of(going)
    assert name == "Completed" and result["released_bytes"] > 0 and result["name"] == "alpha"
    client.until("InstanceRemoved", lambda told: told[3] == (model, "alpha", seen["Run"]))
    client.until("InterfacesRemoved", lambda told: told[3] == (model, [MODEL]))
    with pytest.raises(CallError, match="UnknownMethod"):
        client.get("State", model, MODEL)
    assert (client.get("State"), client.get("Instances"), client.get("Wanted")) == ("idle", [], [])
    # An ended job can be read by a client that comes late.
    late = Client()
    assert late.get("State", going, JOB) == "completed"
    assert late.get_all(job, JOB)["Token"] in job.replace("_3", "")
    late.close()


def test_refusals_have_the_names_of_the_taxonomy_and_their_arithmetic(rig: Rig, client: Client) -> None:
    short = KINDS[ErrorCode.INSUFFICIENT_VRAM].dbus_name
    with pytest.raises(CallError) as plan:
        client.call("Plan", "sa{sv}", "huge", {"context_tokens": GLib.Variant("x", 4096)})
    assert plan.value.name == short == "org.lllm3090.Error.InsufficientVram"
    assert "weights 55,963.7 + kv cache" in plan.value.message and "driver -451.0" in plan.value.message
    job = client.call("Load", "sa{sv}", "huge", {})
    _, _, name, (error, message) = client.end_of(job)
    assert (name, error) == ("Failed", short) and "weights 55,963.7 + kv cache" in message
    assert client.get("Error", job, JOB) == (short, message)
    refused = client.until("Refused", lambda told: told[3][0] == "huge")[3]
    assert refused[1:] == (short, message)
    client.until("JobFailed", lambda told: told[3] == (job, "load", "huge", short, message))
    ends: tuple[tuple[str, str, tuple[Any, ...], ErrorCode], ...] = (
        ("Unload", "sa{sv}", ("alpha", {}), ErrorCode.NOT_LOADED),
        ("Load", "sa{sv}", ("nothing-like-it", {}), ErrorCode.UNKNOWN_MODEL),
    )
    for member, signature, values, code in ends:
        _, _, name, (error, _) = client.end_of(client.call(member, signature, *values))
        assert (name, error) == ("Failed", KINDS[code].dbus_name)
    for member in ("Explain", "Reset"):
        with pytest.raises(CallError) as caught:
            client.call(member, "s", "alpha")
        assert caught.value.name == KINDS[ErrorCode.NOT_LOADED].dbus_name
    assert json.loads(client.call("Plan", "sa{sv}", "alpha", {}))["fits"] is True


V = GLib.Variant
BAD: list[tuple[str, str, tuple[Any, ...], str, str]] = [
    ("Load", "s", ("alpha",), "org.freedesktop.DBus.Error.InvalidArgs", "does not match expected type"),
    ("Load", "sa{ss}", ("alpha", {}), "org.freedesktop.DBus.Error.InvalidArgs", "does not match expected"),
    ("NoSuch", "", (), "org.freedesktop.DBus.Error.UnknownMethod", "No such method"),
    ("Load", "sa{sv}", ("", {}), INVALID, "model: String should have at least 1 character"),
    ("Load", "sa{sv}", ("x" * 256, {}), INVALID, "model: String should have at most 255"),
    ("Load", "sa{sv}", ("alpha", {"colour": V("s", "red")}), INVALID, "colour: Extra inputs"),
    ("Load", "sa{sv}", ("alpha", {"context_tokens": V("s", "8192")}), INVALID, "a valid integer"),
    ("Load", "sa{sv}", ("alpha", {"context_tokens": V("d", float("nan"))}), INVALID, "not a number"),
    ("Load", "sa{sv}", ("alpha", {"context_tokens": V("x", -1)}), INVALID, "greater than or equal to 1"),
    ("Load", "sa{sv}", ("alpha", {"context_tokens": V("v", V("v", V("as", [])))}), INVALID, "valid integer"),
    ("Load", "sa{sv}", ("alpha", {"cache_type": V("ay", b"q8")}), INVALID, "cache_type"),
    ("Load", "sa{sv}", ("alpha", {"model": V("s", "beta")}), INVALID, "model is no option"),
    ("Load", "sa{sv}", ("alpha", {"token": V("s", "a/b")}), INVALID, "token: String should match"),
    ("Unload", "sa{sv}", ("alpha", {"drain_s": V("d", float("inf"))}), INVALID, "or infinite"),
    ("Unload", "sa{sv}", ("alpha", {"token": V("s", "short")}), INVALID, "token: String should match"),
    ("Release", "a{sv}", ({"until_resume": V("i", 1)},), INVALID, "until_resume: Input should be"),
    ("ListModels", "a{sv}", ({"catalogue": V("s", "yes")},), INVALID, "catalogue"),
    ("Explain", "s", ("x" * 300,), INVALID, "at most 255"),
    ("Plan", "sa{sv}", ("alpha", {f"k{n}": V("i", n) for n in range(5000)}), INVALID, "5000 options"),
    ("Load", "sa{sv}", ("alpha", {"gpu": V("s", "x" * MOST_BYTES)}), INVALID, "larger than 1048576 bytes"),
]


def test_bad_arguments_are_told_and_do_no_harm(rig: Rig, client: Client) -> None:
    pid = rig.service.main_pid()
    for member, signature, values, error, words in BAD:
        with pytest.raises(CallError) as caught:
            client.call(member, signature, *values)
        assert caught.value.name == error, (member, caught.value)
        assert words in caught.value.message and len(caught.value.message) < 4000, (member, caught.value)
    for path, interface, name in (
        (ROOT, MANAGER, "NoSuch"),
        (ROOT, MODEL, "State"),
        ("/org", MANAGER, "State"),
    ):
        with pytest.raises(CallError, match=r"org\.freedesktop\.DBus\.Error"):
            client.get(name, path, interface)
    with pytest.raises(CallError, match="not writable"):
        client.call(
            "Set",
            "ssv",
            MANAGER,
            "Released",
            GLib.Variant("b", True),
            interface="org.freedesktop.DBus.Properties",
        )
    assert client.get("Instances") == [] and rig.service.main_pid() == pid


def test_a_job_outlives_its_client_can_be_foretold_and_withdrawn(rig: Rig, client: Client) -> None:
    rig.behave(load_held=True)
    passing, token = Client(), "my-token_1"
    job = path_of_job(token)
    told = GLib.Variant("s", token)
    assert passing.call("Load", "sa{sv}", "alpha", {"token": told}) == job
    with pytest.raises(CallError, match="belongs to another job"):
        passing.call("Unload", "sa{sv}", "alpha", {"token": told})
    passing.close()
    eventually(lambda: client.get("Progress", job, JOB)[0] == "loading", what="it is loading")
    assert client.get("State", job, JOB) == "running" and client.get("State") == "changing"
    rig.behave(load_held=False)
    assert client.end_of(job)[2] == "Completed"
    client.done("Unload", "sa{sv}", "alpha", {})
    with pytest.raises(CallError) as caught:
        client.call("Cancel", path=job, interface=JOB)
    assert caught.value.name == KINDS[ErrorCode.NO_SUCH_LOAD].dbus_name

    rig.behave(load_held=True)
    job = client.call("Load", "sa{sv}", "alpha", {})
    eventually(lambda: client.get("Progress", job, JOB)[0] == "loading", what="it is loading")
    client.call("Cancel", path=job, interface=JOB)
    _, _, name, (error, _) = client.end_of(job)
    assert (name, error) == ("Failed", KINDS[ErrorCode.LOAD_CANCELLED].dbus_name)
    going = client.call("Release", "a{sv}", {})
    with pytest.raises(CallError, match="cannot be withdrawn"):
        client.call("Cancel", path=going, interface=JOB)
    assert client.end_of(going)[2] == "Completed"


def test_the_card_is_given_away_and_taken_back(rig: Rig, client: Client) -> None:
    client.done("Load", "sa{sv}", ODD, {"pin": GLib.Variant("b", True)})
    assert client.get("Pinned", path_of_model(ODD), MODEL) is True
    assert json.loads(client.call("Explain", "s", ODD))
    assert client.call("Reset", path=path_of_model(ODD), interface=MODEL)[1] is False
    models = dict(client.call("ListModels", "a{sv}", {}))
    assert models[ODD]["state"] == "ready" and set(models) == {*MODELS, "huge"}
    done = client.done("Release", "a{sv}", {"until_resume": GLib.Variant("b", True)})
    assert done["names"] == [ODD] and done["until_resume"] is True
    assert (client.get("Released"), client.get("State")) == (True, "released")
    job = client.call("Load", "sa{sv}", "alpha", {})
    assert client.end_of(job)[3][0] == KINDS[ErrorCode.CARD_RELEASED].dbus_name
    assert client.call("Resume") is True
    assert client.get("Released") is False
    assert client.changes(ROOT, MANAGER)["Released"] == [True, False]


def test_a_killed_daemon_loses_the_job_and_not_the_model(rig: Rig, client: Client) -> None:
    rig.behave(load_held=True)
    job = client.call("Load", "sa{sv}", "alpha", {})
    eventually(lambda: client.get("Progress", job, JOB)[0] == "loading", what="it is loading")
    rig.kill_daemon()
    with pytest.raises(CallError, match="UnknownMethod"):
        client.get("State", job, JOB)
    assert client.get("State", path_of_model("alpha"), MODEL) == "loading"
    rig.behave(load_held=False)
    eventually(lambda: client.get("State", path_of_model("alpha"), MODEL) == "ready", what="it is ready")
    client.until("InstanceStateChanged", lambda told: told[3][3] == "ready")
    assert client.get("Adopted", path_of_model("alpha"), MODEL) is True


def test_a_call_starts_a_stopped_daemon(rig: Rig, client: Client) -> None:
    systemctl("stop", SOCKET_UNIT, DAEMON_UNIT)
    assert properties(DAEMON_UNIT, "ActiveState")["ActiveState"] == "inactive"
    assert client.get("State") == "idle"  # answered by the one that this call has started
    client.done("Load", "sa{sv}", "alpha", {})
    systemctl("stop", SOCKET_UNIT, DAEMON_UNIT)
    done = client.done("Unload", "sa{sv}", "alpha", {})  # of a daemon that finds it running
    assert done["released_bytes"] > 0
    assert properties(DAEMON_UNIT, "ActiveState")["ActiveState"] == "active"


def test_a_name_that_another_program_has_is_told_and_taken_when_it_is_free(rig: Rig, client: Client) -> None:
    systemctl("stop", SOCKET_UNIT, DAEMON_UNIT)
    assert client.bus("RequestName", GLib.Variant("(su)", (BUS_NAME, 4))) == 1
    rig.service.start()
    problem = rig.service.request("GET", "/v1/status").json()["dbus_problem"]
    assert problem["code"] == "dbus_unavailable" and f"(pid {os.getpid()})" in problem["detail"]
    assert "has the name" in rig.service.ctl("status").stdout
    client.bus("ReleaseName", GLib.Variant("(s)", (BUS_NAME,)))
    eventually(
        lambda: rig.service.request("GET", "/v1/status").json()["dbus_problem"] is None,
        what="it has the name",
    )
    assert client.get("State") == "idle"


def test_a_bus_that_begins_anew_has_the_daemon_again(shared: Rig) -> None:
    bus = int(properties("dbus.service", "MainPID").get("MainPID", "0"))
    if bus == 0:
        pytest.skip("this session bus is not dbus.service")
    before = Client()
    before.done("Load", "sa{sv}", ODD, {})
    pid = shared.service.main_pid()
    os.kill(bus, signal.SIGKILL)
    eventually(before.con.is_closed, what="the bus is gone")

    def again() -> bool:
        try:
            after = Client()
        except GLib.Error:
            return False
        try:
            # Asked of whoever is there: a bus without the daemon must not start another one.
            return bool(after.bus("NameHasOwner", GLib.Variant("(s)", (BUS_NAME,))))
        finally:
            after.close()

    eventually(again, what="the daemon is on the new bus")
    client = Client()
    assert client.get("State", path_of_model(ODD), MODEL) == "ready"
    client.done("Unload", "sa{sv}", ODD, {})
    client.until("InstanceRemoved")
    client.close()
    assert shared.service.main_pid() == pid
    assert shared.service.request("GET", "/v1/status").json()["dbus_problem"] is None


def test_a_storm_of_calls_loses_no_answer(rig: Rig) -> None:
    command = [sys.executable, str(STORM), "--calls", "100", "--processes", "4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert (told["calls"], told["answered"], told["errors"]) == (400, 400, 0)


def test_the_example_of_the_documentation_works(rig: Rig) -> None:
    def example(model: str) -> str:
        command = [sys.executable, str(EXAMPLE), model]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    assert example("alpha").strip() == rig.service.instances()["alpha"]["endpoint"]
    assert example("huge").startswith("org.lllm3090.Error.InsufficientVram: ")


def test_answered_calls_leave_nothing_behind(private_bus: PrivateBus) -> None:
    """Gio's objects of calls: in Python, older GLib leaves a reference to each that nobody ever drops."""
    kept: list[Any] = []
    info = next(each for each in Gio.DBusNodeInfo.new_for_xml(text()).interfaces if each.name == MANAGER)

    def called(*arguments: Any) -> None:
        member, invocation = arguments[4], arguments[6]
        kept.append(invocation)
        if member == "Resume":
            service_gio.answer(invocation, GLib.Variant("(b)", (True,)))
        else:
            service_gio.refuse(invocation, INVALID, "no")

    async def scenario(bus: BusThread) -> None:
        await bus.call(lambda it: service_gio.register(it.con, ROOT, info, called))
        name = await bus.call(lambda it: str(it.con.get_unique_name()))
        manager = Target(name, ROOT, MANAGER)
        for _ in range(2):
            assert await bus.method(manager, "Resume") == (True,)
            with pytest.raises(RemoteError, match="no"):
                await bus.method(manager, "ListInstances")
        assert [each.ref_count for each in kept] == [1] * 4  # ours alone
        kept.clear()

    on(private_bus, scenario)
