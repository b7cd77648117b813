"""Buffers out of an engine's log: lines of b11434 and of Debian's build 11669."""

from __future__ import annotations

import pytest

from bench.engine_log import is_card, read_log

pytestmark = pytest.mark.unit

LOG = """\
0.00.029.730 I load_tensors:   CPU_Mapped model buffer size =    92.10 MiB
0.00.029.731 I load_tensors:      Vulkan0 model buffer size =     7.50 MiB
0.00.030.693 I llama_context: n_ctx                 = 4096
0.00.030.693 I llama_context: n_ctx_seq             = 2048
0.00.031.077 I llama_context: Vulkan_Host  output buffer size =     0.38 MiB
0.00.031.329 I llama_kv_cache:    Vulkan0 KV buffer size =    47.81 MiB
0.00.031.330 I llama_kv_cache:        CPU KV buffer size =     1.00 MiB
0.00.031.331 I llama_kv_cache: size =   47.81 MiB (  2048 cells,  30 layers,  2/2 seqs), K (q8_0):   23.91 MiB
0.00.031.400 I llama_memory_recurrent:    Vulkan0 RS buffer size =     2.25 MiB
0.00.131.739 I sched_reserve:    Vulkan0 compute buffer size =     8.35 MiB
0.00.131.740 I sched_reserve: Vulkan_Host compute buffer size =     3.00 MiB
0.00.231.739 I sched_reserve:    Vulkan0 compute buffer size =     9.35 MiB
0.00.300.693 I llama_context: n_ctx                 = 8192
0.00.300.700 I llama_kv_cache:    Vulkan0 KV buffer size =     4.00 MiB
0.00.300.800 I sched_reserve:    Vulkan0 compute buffer size =     5.00 MiB
0.00.300.868 I clip_ctx: CLIP using Vulkan0 backend
0.00.300.900 I load_hparams: model size:         0.28 MiB
0.00.301.383 I reserve_compute_meta:    Vulkan0 compute buffer size =     0.09 MiB
0.00.301.384 I alloc_compute_meta:        CPU compute buffer size =     0.02 MiB
some line that no engine wrote
"""


def test_everything_in_its_place() -> None:
    log = read_log(LOG)
    main, draft = log.contexts
    assert (main.tokens, draft.tokens) == (4096, 8192)
    assert main.memory.total(card=True) == pytest.approx(50.06)
    assert main.memory.total(card=False) == 1.0
    assert main.memory.lines == 3
    assert main.output.total(card=False) == 0.38
    assert draft.memory.total(card=True) == 4.0
    assert draft.compute.mib == {"Vulkan0": 5.0}
    assert log.weights.mib == {"CPU_Mapped": 92.1, "Vulkan0": 7.5}
    assert log.projector_weights.mib == {"Vulkan0": 0.28}
    assert log.projector.mib == {"Vulkan0": 0.09, "CPU": 0.02}


def test_a_graph_that_is_reserved_anew_takes_the_place_of_the_old() -> None:
    assert read_log(LOG).contexts[0].compute.mib == {"Vulkan0": 9.35, "Vulkan_Host": 3.0}


def test_nothing_in_nothing() -> None:
    log = read_log("")
    assert log.contexts == []
    assert log.weights.total(card=True) == 0


@pytest.mark.parametrize(
    ("device", "answer"),
    [("CPU", False), ("CPU_Mapped", False), ("CPU_REPACK", False), ("Vulkan_Host", False), ("CUDA0", True)],
)
def test_what_lies_on_a_card(device: str, *, answer: bool) -> None:
    assert is_card(device) is answer
