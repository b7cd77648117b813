"""Whether the files of a model that runs are still those that it was loaded from."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping

from lllm3090d.serving.adoption import Found, is_dead

# A dead network mount never answers; what nobody can tell is not told.
LOOKING_TIME_S = 2.0
# Files are written before they are read: what is newer by more than this was changed after the start.
LEAST_AGE_S = 2.0


async def file_notes(units: Iterable[Found]) -> Mapping[str, str]:
    """What is to be said of the model's files of each unit that runs, by run; nothing where all is as it was."""
    work = {
        asyncio.create_task(asyncio.to_thread(file_note, found)): found.record.run
        for found in units
        if not is_dead(found.status)
    }
    if not work:
        return {}
    done, _ = await asyncio.wait(work, timeout=LOOKING_TIME_S)
    return {run: note for task, run in work.items() if task in done and (note := task.result())}


def file_note(found: Found) -> str:
    """Of one unit; blocking.

    By size and by the time of its last change: a file that is put in its place with the same size and an older time
    is not noticed.
    """
    record = found.record
    running_s = time.monotonic() - found.status.exec_main_start_monotonic_s
    started_s = time.time() - running_s
    total = 0
    for file in record.shards or (record.path,):
        try:
            known = file.stat()
        except OSError:
            return f"{file} cannot be read any more: another start of the model would fail"
        total += known.st_size
        if found.status.exec_main_start_monotonic_s and known.st_mtime > started_s + LEAST_AGE_S:
            return f"{file} was changed after the model was loaded from it: another start may differ"
    if total != record.size_bytes:
        return f"{record.path} is another file than the model was loaded from: another start may differ"
    return ""
