"""The life of one model: its states, and which may follow which. ``Scheduler._move`` is what moves."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType


class InstanceState(enum.StrEnum):
    """States of an instance; clients must treat an unknown value as "in transition"."""

    PLANNED = "planned"  # a plan exists, nothing is held
    QUEUED = "queued"  # waits for room
    RESERVED = "reserved"  # memory is held in the ledger, no unit yet
    STARTING = "starting"  # systemd was asked to start the unit
    LOADING = "loading"  # the engine's process runs and reads the model
    READY = "ready"  # answers, nothing in flight
    BUSY = "busy"  # answers, requests in flight
    STALLED = "stalled"  # busy without progress
    STOPPING = "stopping"  # its requests may still end, or the unit was asked to stop
    STUCK = "stuck"  # survived SIGKILL
    RELEASING = "releasing"  # the unit is gone, its memory is not back yet
    GONE = "gone"  # nothing is left
    FAILED = "failed"  # ended by itself; the reason is kept
    LATCHED = "latched"  # failed too often: no automatic restart


S = InstanceState
TRANSITIONS: Mapping[InstanceState, frozenset[InstanceState]] = MappingProxyType(
    {
        S.PLANNED: frozenset({S.QUEUED, S.RESERVED, S.GONE, S.FAILED}),
        S.QUEUED: frozenset({S.RESERVED, S.GONE, S.FAILED}),
        S.RESERVED: frozenset({S.STARTING, S.GONE, S.FAILED}),
        S.STARTING: frozenset({S.LOADING, S.READY, S.STOPPING, S.RELEASING, S.FAILED}),
        S.LOADING: frozenset({S.READY, S.STOPPING, S.RELEASING, S.FAILED}),
        S.READY: frozenset({S.BUSY, S.STALLED, S.STOPPING, S.RELEASING, S.FAILED}),
        S.BUSY: frozenset({S.READY, S.STALLED, S.STOPPING, S.RELEASING, S.FAILED}),
        S.STALLED: frozenset({S.READY, S.BUSY, S.STOPPING, S.RELEASING, S.FAILED}),
        S.STOPPING: frozenset({S.RELEASING, S.STUCK, S.FAILED}),
        S.STUCK: frozenset({S.RELEASING, S.FAILED}),
        S.RELEASING: frozenset({S.GONE, S.FAILED, S.LATCHED}),
        S.GONE: frozenset(),
        S.FAILED: frozenset({S.GONE, S.LATCHED}),
        S.LATCHED: frozenset({S.GONE}),
    }
)
SERVING = frozenset({S.READY, S.BUSY, S.STALLED})
ON_THE_WAY_UP = frozenset({S.RESERVED, S.STARTING, S.LOADING})
ON_THE_WAY_DOWN = frozenset({S.STOPPING, S.STUCK, S.RELEASING})
ENDED = frozenset({S.GONE, S.FAILED, S.LATCHED})
