"""The door of an engine: shut for a drain, found by the next daemon, opened again. With real Unix sockets."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lllm3090d.serving.drains import LONGEST_S, Drain, Purpose, doors, found, reopen, shut, taken_up, way_in

pytestmark = pytest.mark.unit

NOW_S = 1000.0
DRAIN = Drain(30.0, NOW_S + 30.0)


@pytest.fixture
def path() -> Iterator[Path]:
    """A socket on which somebody listens."""
    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        bound = Path(directory, "engine-1a2b.sock")
        listener.bind(str(bound))
        listener.listen()
        yield bound


def connects(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except FileNotFoundError:
            return False
        return True


def test_a_shut_door_refuses_who_comes_and_keeps_who_is_there(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as inside:
        inside.connect(str(path))
        door = shut(path, DRAIN)
        assert not connects(path)
        assert connects(door)
        inside.sendall(b"still here")
    assert door in doors(path)
    # Paths of sockets are short; a longer one could not be connected to.
    assert all(len(str(each)) == len(str(path)) for each in doors(path))


def test_who_has_a_lease_finds_the_way_in(path: Path) -> None:
    assert way_in(path) == path
    door = shut(path, DRAIN)
    assert way_in(path) == door
    assert connects(way_in(path))
    door.unlink()
    assert way_in(path) == path


@pytest.mark.parametrize("purpose", Purpose)
def test_the_next_daemon_finds_what_for_and_until_when(path: Path, purpose: Purpose) -> None:
    assert found(path, NOW_S) is None
    drain = replace(DRAIN, purpose=purpose)
    shut(path, drain)
    assert found(path, NOW_S + 10) == replace(drain, limit_s=20.0)
    over = found(path, NOW_S + 40)
    assert over is not None
    assert (over.limit_s, over.deadline_s) == (0.0, NOW_S + 40)


def test_a_drain_is_hurried_and_gets_another_purpose(path: Path) -> None:
    shut(path, replace(DRAIN, purpose=Purpose.RESTART))
    door = shut(path, replace(DRAIN, deadline_s=NOW_S + 5))
    assert connects(door)
    assert found(path, NOW_S) == Drain(5.0, NOW_S + 5)
    assert len(list(path.parent.iterdir())) == 1


def test_one_for_an_unload_goes_on_and_one_for_a_restart_is_undone(path: Path) -> None:
    shut(path, DRAIN)
    assert taken_up(path, NOW_S) == DRAIN
    assert not connects(path)
    shut(path, replace(DRAIN, purpose=Purpose.RESTART))
    assert taken_up(path, NOW_S) is None
    assert connects(path)
    assert taken_up(path, NOW_S) is None
    assert not reopen(path)


def test_a_time_that_nobody_has_written_is_no_drain_for_ever(path: Path) -> None:
    shut(path, replace(DRAIN, deadline_s=1e9))
    drain = found(path, NOW_S)
    assert drain is not None
    assert drain.deadline_s == NOW_S + LONGEST_S


def test_a_socket_that_is_not_there_is_left_alone(path: Path) -> None:
    path.unlink()
    assert shut(path, DRAIN) == path
    assert found(path, NOW_S) is None


@pytest.mark.parametrize("text", ["/", ".", "/a/b", "/x.sock.sock", "x.sock"])
def test_whatever_a_record_names_has_doors_of_its_own(text: str) -> None:
    assert len(set(doors(Path(text)))) == 1 + len(Purpose)


def test_what_cannot_be_renamed_is_said(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path, __: Path) -> None:
        raise PermissionError(13, "no")

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError):
        shut(path, DRAIN)
    assert connects(path)
