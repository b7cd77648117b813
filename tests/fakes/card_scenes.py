"""A card of 24 GiB with a game, two models, and one that did not give its memory back: told by the real code."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from lllm3090d.checkpoints.library import Checkpoint
from lllm3090d.engines.memory_log import read_memory_log
from lllm3090d.errors import ErrorCode, LlmError
from lllm3090d.gpus.readings import Card, CardKind, CardProcess, MemoryReading, PcieLink
from lllm3090d.planning.launch import Launch
from lllm3090d.planning.planner import CacheType, CappedBy, Plan
from lllm3090d.planning.quote import Evidence, LineItem, Place, Quote
from lllm3090d.planning.reserves import ReservePolicy
from lllm3090d.planning.tier_conditions import HostMemory
from lllm3090d.planning.units import MIB
from lllm3090d.serving.admission import rooms
from lllm3090d.serving.card_views import Scene, gpus_view
from lllm3090d.serving.explain_views import Learnt, explain_view
from lllm3090d.serving.instance import InstanceState
from lllm3090d.serving.ledger import Ledger, Share
from lllm3090d.serving.observation import HOST, CardState, Observation, Stranger
from lllm3090d.serving.running import Instance
from lllm3090d.serving.unit_spec import Record
from lllm3090d.wire_cards import ExplainView, Gpus

NOW_S = 1000.0
CARD = Card(
    CardKind.NVIDIA,
    "GPU-1",
    "NVIDIA GeForce RTX 3090",
    "580.95.05",
    total_bytes=24576 * MIB,
    pci_address="0000:01:00.0",
    compute_capability="8.6",
    link=PcieLink(4, 16),
)
HOST_MEMORY = HostMemory(available_bytes=40 << 30, total_bytes=64 << 30)
RESERVES = ReservePolicy(driver_reserve_mib=512, desktop_reserve_mib=2048)


def item(name: str, mib: int, place: Place = Place.CARD) -> LineItem:
    """A line of a price."""
    return LineItem(name, place, mib * MIB, Evidence.HEADER, f"the arithmetic of {name}")


QWEN = (
    item("weights", 9000),
    item("kv cache", 1500),
    item("compute", 600),
    item("runtime", 640),
    item("slack", 128),
    item("token embedding", 300, Place.HOST),
    item("prompt cache", 2048, Place.HOST),
    item("process", 300, Place.HOST),
)
SMOL = (item("weights", 100), item("kv cache", 400), item("process", 300, Place.HOST))


def instance(
    name: str, run: str, items: tuple[LineItem, ...], state: InstanceState = InstanceState.READY
) -> Instance:
    """A model that runs."""
    launch = Launch(
        context_tokens=8192,
        parallel=2,
        cache_type_k=CacheType.Q8_0,
        cache_type_v=CacheType.Q8_0,
        batch_tokens=2048,
        micro_batch_tokens=512,
        context_checkpoints=0,
        prompt_cache_mib=0,
    )
    plan = Plan(
        launch=launch, window_tokens=4096, quote=Quote(items), capped_by=CappedBy.MODEL, on_card=True
    )
    path = Path(f"/models/{name}/{name}.gguf")
    record = Record.of(
        run=run,
        checkpoint=Checkpoint(name=name, path=path, shards=(path,), size_bytes=100 * MIB),
        plan=plan,
        socket=Path(f"/run/{run}.sock"),
        engine_version="0.6.0-dev (build 11434, commit abc)",
    )
    return Instance(record=record, plan=plan, state=state, main_pid=4711)


def shares(items: tuple[LineItem, ...], card: str = CARD.uuid) -> list[Share]:
    """What a launch takes of a card, and of the host beside it."""
    by_place = ((card, Place.CARD), (HOST, Place.HOST))
    return [Share(where, tuple(i for i in items if i.place is place)) for where, place in by_place]


@dataclass
class Desk:
    """All that is told, to be changed by a test before it is."""

    card: Card = CARD
    total_bytes: int = 24576 * MIB
    driver_bytes: int | None = 451 * MIB
    foreign_bytes: int = 1901 * MIB  # 1900 of the game, and 1 that nobody is listed with
    unlisted_return_bytes: int = 300 * MIB  # of the model that has ended
    attributed: bool = True
    desktop_active: bool | None = True
    problem: LlmError | None = None
    host: HostMemory | None = HOST_MEMORY
    ledger: Ledger = field(default_factory=Ledger)
    in_use: dict[str, int] = field(default_factory=lambda: {"q1": 11700 * MIB, "s1": 120 * MIB})
    host_in_use: dict[str, int] = field(default_factory=lambda: {"q1": 400 * MIB})
    strangers: tuple[Stranger, ...] = (
        Stranger(1234, "steam", "", 1900 * MIB),
        Stranger(77, "Xorg", "anna", None),
    )

    def __post_init__(self) -> None:
        """One ready and measured, one loading, one that is gone but for 300 MiB."""
        self.instances = {
            "q1": instance("Qwen3.8-27B", "q1", QWEN),
            "s1": instance("SmolLM2-135M", "s1", SMOL, InstanceState.LOADING),
        }
        self.ledger.hold("q1", "Qwen3.8-27B", shares(QWEN), 100.0)
        self.ledger.confirm("q1", {CARD.uuid: 11900 * MIB, HOST: 650 * MIB}, 130.0)
        self.ledger.hold("s1", "SmolLM2-135M", shares(SMOL), 990.0)
        self.ledger.hold("o1", "old", [Share(CARD.uuid, (item("weights", 500),))], 0.0)
        self.ledger.releasing("o1", 900.0)
        self.ledger.settle("o1", {CARD.uuid: 300 * MIB}, 910.0)

    @property
    def observation(self) -> Observation:
        """The card as it would be read."""
        used = sum(self.in_use.values()) + self.foreign_bytes + self.unlisted_return_bytes
        listed = [CardProcess(each.pid, each.used_bytes) for each in self.strangers]
        listed += [CardProcess(4711 + i, size) for i, size in enumerate(self.in_use.values())]
        free = self.total_bytes - (self.driver_bytes or 0) - used
        reading = MemoryReading(
            NOW_S - 0.25, self.total_bytes, self.driver_bytes, used, free, tuple(listed), self.attributed
        )
        state = CardState(
            self.card,
            None if self.problem else reading,
            self.problem,
            self.in_use if self.attributed else {},
            self.in_use if self.attributed else {},
            self.strangers if self.attributed else (),
            self.attributed,
        )
        return Observation((state,), self.desktop_active, self.host, self.host_in_use)

    @property
    def scene(self) -> Scene:
        """Everything, with the budgets of the real arithmetic."""
        observation = self.observation
        made = rooms(observation, self.ledger, RESERVES)
        return Scene(observation, self.ledger, made.cards, made.host, self.instances, NOW_S)

    @property
    def view(self) -> Gpus:
        """What ``GET /v1/gpus`` says."""
        return gpus_view(self.scene)


LOST = LlmError(ErrorCode.CARD_UNREADABLE, "GPU is lost.", hint="Restart the computer.")
LOG = """\
0.00.029.730 I load_tensors:  CUDA_Host model buffer size =   299.50 MiB
0.00.029.731 I load_tensors:      CUDA0 model buffer size =  8998.25 MiB
0.00.030.693 I llama_context: n_ctx                 = 8192
0.00.031.077 I llama_context:  CUDA_Host  output buffer size =     1.00 MiB
0.00.031.329 I llama_kv_cache:      CUDA0 KV buffer size =  1400.00 MiB
0.00.031.400 I llama_memory_recurrent:      CUDA0 RS buffer size =   100.00 MiB
0.00.131.739 I sched_reserve:      CUDA0 compute buffer size =   571.25 MiB
"""


def explained(log: str = LOG) -> ExplainView:
    """What ``GET /v1/models/{name}/explain`` says."""
    desk = Desk()
    known = Learnt(None, note="Nothing was measured of this checkpoint with its engine on this card before.")
    return explain_view(
        desk.instances["q1"], desk.ledger, desk.observation, read_memory_log(log.splitlines()), known
    )


def on_host() -> Desk:
    """The same machine without a card: host memory takes its place."""
    card = Card(CardKind.CPU, HOST, "host memory (x86_64)", None)
    desk = Desk(card=card, total_bytes=32768 * MIB, driver_bytes=0, host=None, strangers=())
    desk.ledger = Ledger()
    items = tuple(replace(each, place=Place.CARD) for each in QWEN)
    desk.ledger.hold("q1", "Qwen3.8-27B", [Share(HOST, items)], 100.0)
    desk.instances = {"q1": instance("Qwen3.8-27B", "q1", items)}
    desk.in_use = {"q1": 5000 * MIB}
    return desk
