"""What this machine has learnt of launches like one that runs. Blocking, for threads."""

from __future__ import annotations

from lllm3090d.checkpoints.fingerprint import fingerprint
from lllm3090d.engines.capabilities import Backend, Build
from lllm3090d.errors import LlmError
from lllm3090d.planning.calibration import CalibrationScope, launch_text
from lllm3090d.serving.calibrations import Calibrations
from lllm3090d.serving.explain_views import Learnt
from lllm3090d.serving.lookup import FoundModel, Lookup
from lllm3090d.serving.running import Instance

NO_BUILD = "Its engine is no longer among those that are found here, so nothing is looked up for it."


def learnt_of(instance: Instance, lookup: Lookup, card: str) -> Learnt:
    """What is known of a running model's checkpoint with its build on a card.

    Args:
        instance: the model.
        lookup: for headers, digests and the store.
        card: UUID of the card, or the host's name.
    """
    record = instance.record
    try:
        found = _engine(record.engine_server, lookup)
        if found is None:
            return Learnt(None, note=NO_BUILD)
        build, backend = found
        scope = CalibrationScope(
            checkpoint=fingerprint(record.shards or (record.path,), lookup.header),
            engine=lookup.engines.digest(build),
            backend=backend,
            card=card,
        )
        model = lookup.model(instance.name) if instance.plan.with_projector else None
        projector = model.projector if isinstance(model, FoundModel) else None
    except LlmError as error:
        return Learnt(None, note=f"Nothing is looked up: {error.message}")
    known = Calibrations(lookup.store).of(scope, record.arguments)
    note = (
        "" if known.seen else "Nothing was measured of this checkpoint with its engine on this card before."
    )
    return Learnt(known, launch_text(instance.plan.launch, projector, record.arguments), note)


def _engine(server: str | None, lookup: Lookup) -> tuple[Build, Backend] | None:
    for state in lookup.engines.all():
        if state.build is None or state.capabilities is None or str(state.build.server) != server:
            continue
        backend = state.capabilities.backend
        return None if backend is None else (state.build, backend)
    return None
