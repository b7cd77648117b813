"""What ``llama-server -lv 4`` logs about its buffers, as data."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

MIB = 1 << 20
CONTEXT = re.compile(r"\bllama_context: n_ctx\s+= (\d+)")
BUFFER = re.compile(
    r"\b(?P<by>\w+):\s+(?P<device>\S+)\s+(?P<kind>KV|RS|compute|output|model) buffer size =\s*(?P<mib>[\d.]+) MiB"
)
PROJECTOR_DEVICE = re.compile(r"CLIP using (\S+) backend")
PROJECTOR_WEIGHTS = re.compile(r"model size:\s+([\d.]+) MiB")
PROJECTOR_GRAPHS = ("alloc_compute_meta", "reserve_compute_meta")
HOST_SUFFIX = "_Host"  # memory of the host that a card's backend has pinned


def is_card(device: str) -> bool:
    """A buffer of that name lies on a card."""
    return not device.startswith("CPU") and not device.endswith(HOST_SUFFIX)


@dataclass(slots=True)
class Sizes:
    """Buffers of one kind, MiB by device; the log has two decimals, so each may be off by half of the last."""

    mib: dict[str, float] = field(default_factory=dict)
    lines: int = 0

    def add(self, device: str, mib: float) -> None:
        """One more line."""
        self.mib[device] = self.mib.get(device, 0.0) + mib
        self.lines += 1

    def total(self, *, card: bool) -> float:
        """MiB on cards, or in host memory."""
        return sum(size for device, size in self.mib.items() if is_card(device) is card)


@dataclass(slots=True)
class ContextLog:
    """One context: the main one first, then that of a draft.

    Attributes:
        tokens: ``n_ctx``.
        memory: caches and states.
        compute: compute buffers.
        output: of its logits.
    """

    tokens: int
    memory: Sizes = field(default_factory=Sizes)
    compute: Sizes = field(default_factory=Sizes)
    output: Sizes = field(default_factory=Sizes)


@dataclass(slots=True)
class EngineLog:
    """All buffers of a start.

    Attributes:
        contexts: in order.
        weights: of every model.
        projector: compute buffers of a projector.
        projector_weights: its tensors.
    """

    contexts: list[ContextLog] = field(default_factory=list)
    weights: Sizes = field(default_factory=Sizes)
    projector: Sizes = field(default_factory=Sizes)
    projector_weights: Sizes = field(default_factory=Sizes)


def read_log(text: str) -> EngineLog:
    """The buffers that a log tells of."""
    log, encoder = EngineLog(), ""
    for found in _matches(text):
        if found.re is CONTEXT:
            log.contexts.append(ContextLog(int(found[1])))
        elif found.re is PROJECTOR_DEVICE:
            encoder = found[1]
        elif found.re is PROJECTOR_WEIGHTS:
            log.projector_weights.add(encoder, float(found[1]))
        else:
            _add_buffer(log, found)
    return log


def _add_buffer(log: EngineLog, found: re.Match[str]) -> None:
    device, kind, mib = found["device"], found["kind"], float(found["mib"])
    if kind == "model":
        log.weights.add(device, mib)
    elif found["by"] in PROJECTOR_GRAPHS or not log.contexts:
        log.projector.add(device, mib)
    elif kind == "compute":  # reserved anew when the graph changes; then the old one is given back
        compute = log.contexts[-1].compute.mib
        compute[device] = max(mib, compute.get(device, 0.0))
    else:
        context = log.contexts[-1]
        (context.output if kind == "output" else context.memory).add(device, mib)


def _matches(text: str) -> Iterator[re.Match[str]]:
    for line in text.splitlines():
        for pattern in (CONTEXT, BUFFER, PROJECTOR_DEVICE, PROJECTOR_WEIGHTS):
            found = pattern.search(line)
            if found is not None:
                yield found
