"""Which memory is managed: an NVIDIA card, or host memory in its place."""

from __future__ import annotations

from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.host import HostMemoryReader
from lllm3090d.gpus.nvml import NoCardError, NvmlReader
from lllm3090d.gpus.readings import CardReader
from lllm3090d.settings import CardChoice


def open_card(choice: CardChoice) -> CardReader:
    """Open the card that the setting ``card`` asks for.

    With ``auto`` only a machine without an NVIDIA driver or device gets host memory. A driver that is there
    and does not answer is an error: to fall back silently would put a model meant for the card into host
    memory.

    Raises:
        LlmError: CARD_UNREADABLE where a driver is broken, or where ``nvidia`` is asked for and absent.
    """
    if choice is CardChoice.CPU:
        return HostMemoryReader()
    try:
        return NvmlReader()
    except NoCardError as error:
        if choice is CardChoice.AUTO:
            return HostMemoryReader()
        raise LlmError(
            ErrorCode.CARD_UNREADABLE,
            f'The setting card = "nvidia" asks for an NVIDIA card, and there is none: {error}.',
            hint='Install the NVIDIA driver and check nvidia-smi, or set card = "auto" or "cpu".',
            nvml_text=str(error),
        ) from error
