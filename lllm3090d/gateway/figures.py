"""What happened to requests since the daemon started, counted. :mod:`lllm3090d.gateway.metrics` tells it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from lllm3090d.gateway.record import Outcome, Record
from lllm3090d.serving.statistics import Histogram

# Upper bounds, seconds: a small model answers in milliseconds, a long prompt takes minutes.
FIRST_BYTE_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
REQUEST_SECONDS = (0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
WAIT_SECONDS = (0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
# Each model is a label of its own; those beyond are one together.
MOST_MODELS = 200
OTHERS = "(others)"


@dataclass(slots=True)
class ModelFigures:
    """Of the requests of one model.

    Attributes:
        outcomes: how they ended.
        first_byte: until the first byte of an answer.
        total: until the end of one that was served.
        load_wait: of those that waited for the model to be loaded.
        line_wait: until they had a slot, whether or not they had to wait for one.
        prompt_tokens: as answers told.
        generated_tokens: as answers told.
    """

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    first_byte: Histogram = field(default_factory=lambda: Histogram(FIRST_BYTE_SECONDS))
    total: Histogram = field(default_factory=lambda: Histogram(REQUEST_SECONDS))
    load_wait: Histogram = field(default_factory=lambda: Histogram(WAIT_SECONDS))
    line_wait: Histogram = field(default_factory=lambda: Histogram(WAIT_SECONDS))
    prompt_tokens: int = 0
    generated_tokens: int = 0


class GatewayFigures:
    """Counters of one daemon process.

    Attributes:
        models: by name; the empty name has those that asked for none.
        refusals: by code.
    """

    def __init__(self) -> None:
        self.models: dict[str, ModelFigures] = {}
        self.refusals: Counter[str] = Counter()

    def ended(self, record: Record) -> None:
        """A request has ended."""
        figures = self._of(record.model)
        figures.outcomes[record.outcome] += 1
        if record.outcome is Outcome.REFUSED:
            self.refusals[record.code] += 1
        if record.load_s:
            figures.load_wait.add(record.load_s)
        if record.first_byte_s is not None:
            figures.first_byte.add(record.first_byte_s)
            figures.line_wait.add(record.line_s)
        if record.outcome is Outcome.SERVED and record.model:
            figures.total.add(record.total_s)
        figures.prompt_tokens += record.prompt_tokens or 0
        figures.generated_tokens += record.generated_tokens or 0

    def _of(self, model: str) -> ModelFigures:
        figures = self.models.get(model)
        if figures is None:
            name = model if len(self.models) < MOST_MODELS else OTHERS
            figures = self.models.setdefault(name, ModelFigures())
        return figures
