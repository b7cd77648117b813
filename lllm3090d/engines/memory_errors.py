"""Whether an engine ended for want of device memory, by its last lines. Pure.

The texts are those of llama.cpp b11434 and of the drivers it passes on; a line of another kind is never taken for one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

OUT_OF_DEVICE_MEMORY = "out_of_device_memory"
_DEVICE = r"(?:CUDA|Vulkan|ROCm|SYCL)\d*(?:_Split)?"
_SAYS_SO = re.compile(
    r"(?:cuda|hip)\w*Malloc\w* failed: out of memory"
    r"|(?:CUDA|ROCm|HIP) error: out of memory"
    r"|ErrorOutOfDeviceMemory|VK_ERROR_OUT_OF_DEVICE_MEMORY"
    r"|ggml_vulkan: Device memory allocation of size \d+ failed"
    rf"|(?:failed|unable) to allocate {_DEVICE} buffer"
    # What follows has no place in its text; on a card it is the card's, whose own line comes before.
    r"|failed to allocate buffer for (?:kv|rs) cache"
    r"|failed to allocate compute (?:pp |tg )?buffers",
    re.IGNORECASE,
)


def ran_out_of_device_memory(lines: Iterable[str]) -> str | None:
    """The first line that says so; None where none does."""
    return next((line for line in lines if _SAYS_SO.search(line)), None)
