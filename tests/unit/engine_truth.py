"""The engine's own figures of ``tests/data/engine_truth_subset.json``, and the facts of the models in it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lllm3090d.checkpoints.facts import CheckpointFacts, LayerFacts, LayerKind
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning.cache import CacheShape, CacheType, cache_shape
from lllm3090d.planning.quote import PlanPolicy

DATA = Path(__file__).parent.parent / "data" / "engine_truth_subset.json"
GEMMA3_PERIOD = 6  # every sixth layer of gemma3 attends to everything

POLICY = PlanPolicy(
    cache_type=CacheType.Q8_0,
    batch_tokens=2048,
    micro_batch_tokens=512,
    context_checkpoints=8,
    prompt_cache_mib=1024,
    workspace_reserve_mib=1024,
)


@dataclass(frozen=True, slots=True)
class TruthRow:
    """One dry run of the engine; bytes and tokens."""

    model: str
    source: str
    backend: Backend
    context: int
    cache_type_k: CacheType
    cache_type_v: CacheType
    parallel: int
    batch: int
    micro_batch: int
    outputs: int
    n_ctx: int
    n_ctx_seq: int
    context_bytes: int
    model_card_bytes: int
    model_host_bytes: int
    compute_card_bytes: int
    compute_host_bytes: int

    @property
    def facts(self) -> CheckpointFacts:
        """The model of the row."""
        return facts_of(self.model)

    @property
    def shape(self) -> CacheShape:
        """Our own shape for the arguments of the row."""
        return cache_shape(
            self.facts,
            context_tokens=self.context,
            parallel=self.parallel,
            batch_tokens=self.batch,
            micro_batch_tokens=self.micro_batch,
        )


@cache
def _document() -> dict[str, Any]:
    document: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return document


@cache
def truth_rows() -> tuple[TruthRow, ...]:
    """All rows."""
    rows = []
    for values in _document()["rows"]:
        row = dict(zip(_document()["columns"], values, strict=True))
        row["backend"] = Backend(row["backend"])
        row["cache_type_k"] = CacheType(row["cache_type_k"])
        row["cache_type_v"] = CacheType(row["cache_type_v"])
        rows.append(TruthRow(**row))
    return tuple(rows)


def model_names() -> tuple[str, ...]:
    """The models of the file."""
    return tuple(_document()["models"])


@cache
def facts_of(model: str) -> CheckpointFacts:
    """The facts of a model, from its dimensions."""
    dims = _document()["models"][model]
    window = dims["sliding_window_tokens"]
    layers = []
    for index, weight_bytes in enumerate(dims["layer_weight_bytes"]):
        slides = window > 0 and index % GEMMA3_PERIOD != GEMMA3_PERIOD - 1
        layers.append(
            LayerFacts(
                kind=LayerKind.SLIDING if slides else LayerKind.FULL,
                head_count=dims["head_count"],
                key_length=dims["key_length"],
                k_values=dims["head_count_kv"] * dims["key_length"],
                v_values=dims["head_count_kv"] * dims["value_length"],
                feed_forward_length=dims["feed_forward_length"],
                weight_bytes=weight_bytes,
            )
        )
    return CheckpointFacts(
        architecture=dims["architecture"],
        title=model,
        quantisation=dims["quantisation"],
        trained_context_tokens=dims["trained_context_tokens"],
        embedding_length=dims["embedding_length"],
        vocabulary_size=dims["vocabulary_size"],
        sliding_window_tokens=window,
        layers=tuple(layers),
        token_embedding_bytes=dims["token_embedding_bytes"],
        output_bytes=dims["output_bytes"],
        other_bytes=dims["other_bytes"],
        file_bytes=0,
        has_chat_template=False,
    )
