"""What the kernel has just said of NVIDIA's cards, from the journal.

Asked once, when an engine has ended, where neither NVML nor the kernel's own messages tell of errors: following the
journal would take a process that lives as long as the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from asyncio.subprocess import DEVNULL, PIPE

from lllm3090d.gpus.xids import Xid, xids_in

log = logging.getLogger(__name__)

LIMIT_S = 2.0
PROGRAM = "journalctl"


async def recent_xids(seconds: float, program: str = PROGRAM) -> tuple[tuple[str, Xid], ...]:
    """Errors of the last so many seconds, each with the PCI address of its card; none where nobody may read them.

    Args:
        seconds: how far back.
        program: that reads the journal.
    """
    argv = [program, "--dmesg", "--no-pager", "--quiet", "--output=cat", f"--since=-{seconds:.0f}s"]
    try:
        process = await asyncio.create_subprocess_exec(*argv, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL)
    except OSError as error:
        log.info("the kernel's messages are not in reach", extra={"reason": error.strerror})
        return ()
    said = b""
    try:
        async with asyncio.timeout(LIMIT_S):
            said, _ = await process.communicate()
    except TimeoutError:
        log.info("the kernel's messages are not in reach", extra={"reason": "journalctl does not answer"})
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself just now
                process.kill()
            await process.wait()
    return xids_in(said.decode("utf-8", errors="replace"))
