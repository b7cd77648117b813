"""Errors of cards from the journal, asked once."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from lllm3090d.serving import kernel_journal
from lllm3090d.serving.kernel_journal import recent_xids

pytestmark = pytest.mark.unit


def program(directory: Path, text: str) -> str:
    path = directory / "journalctl"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_what_the_kernel_said(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    journalctl = program(
        tmp_path,
        f'echo "$@" > {asked}\necho "usb 1-1: new device"\n'
        "echo \"NVRM: Xid (PCI:0000:01:00): 79, pid='<unknown>', GPU has fallen off the bus.\"\necho bad >&2",
    )
    ((where, xid),) = asyncio.run(recent_xids(60.0, journalctl))
    assert (where, xid.number, xid.pid) == ("0000:01:00.0", 79, None)
    assert "--dmesg" in asked.read_text()
    assert "--since=-60s" in asked.read_text()


def test_nobody_may_read_it(tmp_path: Path) -> None:
    assert asyncio.run(recent_xids(60.0, program(tmp_path, "echo denied >&2; exit 1"))) == ()
    assert asyncio.run(recent_xids(60.0, str(tmp_path / "none"))) == ()


def test_a_journal_that_does_not_answer_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_journal, "LIMIT_S", 0.1)
    began = time.monotonic()
    assert asyncio.run(recent_xids(60.0, program(tmp_path, "exec sleep 30"))) == ()
    assert time.monotonic() - began < 20
