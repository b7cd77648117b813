"""Pure rooms do no I/O, D-Bus and NVML have one room each, client and daemon are strangers."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parent.parent.parent
DAEMON = ROOT / "lllm3090d"
CLIENT = ROOT / "lllm3090ctl"
PURE = (
    *sorted((DAEMON / "planning").glob("*.py")),
    *(DAEMON / "serving" / name for name in ("ledger.py", "scheduler.py", "instance.py")),
)
IO_MODULES = frozenset(
    {
        "aiohttp", "asyncio", "ctypes", "fcntl", "gi", "glob", "http", "io", "mmap", "multiprocessing",
        "os", "pydbus", "pynvml", "requests", "sdnotify", "select", "selectors", "shutil", "signal",
        "socket", "sqlite3", "subprocess", "tempfile", "threading", "urllib",
    }
)  # fmt: skip
# Paths may be passed on as data, but not followed.
PATH_IO = frozenset(
    {
        "cwd", "exists", "expanduser", "glob", "home", "is_dir", "is_file", "is_socket", "iterdir", "lstat",
        "mkdir", "open", "read_bytes", "read_text", "resolve", "rglob", "rmdir", "samefile", "stat",
        "symlink_to", "touch", "unlink", "write_bytes", "write_text",
    }
)  # fmt: skip
PLANNING_MAY_IMPORT = (
    "lllm3090d.checkpoints.catalogue",
    "lllm3090d.checkpoints.facts",
    "lllm3090d.checkpoints.unruled",
    "lllm3090d.engines.capabilities",
    "lllm3090d.errors",
    "lllm3090d.gpus.profiles",
    "lllm3090d.gpus.readings",
    "lllm3090d.planning",
)


def imported(file: Path) -> Iterator[str]:
    """Dotted names of all modules a file imports, wherever in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), file.name)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def tops(file: Path) -> set[str]:
    """Top-level packages a file imports."""
    return {name.split(".", 1)[0] for name in imported(file)}


def python_files(*rooms: Path) -> list[Path]:
    return sorted(file for room in rooms for file in room.rglob("*.py"))


def where(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_the_rooms_are_where_this_test_looks() -> None:
    assert {file.name for file in PURE} >= {
        "cache.py",
        "compute.py",
        "planner.py",
        "quote.py",
        "reserves.py",
    }
    assert any("pydbus" in tops(file) for file in python_files(DAEMON / "bus"))
    assert "pynvml" in tops(DAEMON / "gpus" / "nvml.py")
    assert python_files(CLIENT)


@pytest.mark.parametrize("file", PURE, ids=where)
def test_pure_modules_import_nothing_that_does_io(file: Path) -> None:
    assert tops(file) & IO_MODULES == set()


@pytest.mark.parametrize("file", PURE, ids=where)
def test_pure_modules_follow_no_path_and_open_nothing(file: Path) -> None:
    called = {
        node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)
    }
    assert called & (PATH_IO | {"print", "input", "exec", "eval", "__import__"}) == set()


@pytest.mark.parametrize("file", python_files(DAEMON / "planning"), ids=where)
def test_planning_looks_at_plain_data_only(file: Path) -> None:
    ours = {name for name in imported(file) if name.split(".", 1)[0] == "lllm3090d"}
    assert {name for name in ours if not name.startswith(PLANNING_MAY_IMPORT)} == set()


@pytest.mark.parametrize(
    "module", ["planning.planner", "planning.reserves", "planning.catalogue_price", "serving.scheduler"]
)
def test_importing_a_pure_module_loads_no_bus_and_no_driver(module: str) -> None:
    """Not through others either."""
    code = f"import sys, lllm3090d.{module}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    )
    loaded = {name.split(".", 1)[0] for name in done.stdout.split()}
    assert "lllm3090d" in loaded
    assert loaded & {"gi", "pydbus", "pynvml", "aiohttp", "sqlite3", "numpy", "gguf"} == set()


@pytest.mark.parametrize("file", python_files(DAEMON, CLIENT), ids=where)
def test_bus_and_driver_have_one_room_each(file: Path) -> None:
    if not file.is_relative_to(DAEMON / "bus"):
        assert tops(file) & {"gi", "pydbus"} == set()
    if not file.is_relative_to(DAEMON / "gpus"):
        assert "pynvml" not in tops(file)


@pytest.mark.parametrize("file", python_files(CLIENT), ids=where)
def test_the_client_imports_nothing_of_the_daemon(file: Path) -> None:
    assert "lllm3090d" not in tops(file)


@pytest.mark.parametrize("file", python_files(DAEMON), ids=where)
def test_the_daemon_imports_nothing_of_the_client(file: Path) -> None:
    assert "lllm3090ctl" not in tops(file)
