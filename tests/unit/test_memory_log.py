"""What engines write of their memory: whole logs of llama-server b11434, and lines of other builds and devices."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.engines.memory_log import EnginePart, MemoryLog, read_memory_log
from lllm3090d.planning.units import MIB

pytestmark = pytest.mark.unit

LOGS = Path(__file__).parents[1] / "data" / "engine_logs"  # llama.cpp (MIT licence, the ggml authors)
VULKAN = """\
0.00.029.730 I load_tensors:   CPU_Mapped model buffer size =    92.10 MiB
0.00.029.731 I load_tensors:      Vulkan0 model buffer size =     7.50 MiB
0.00.030.693 I llama_context: n_ctx                 = 4096
0.00.031.077 I llama_context: Vulkan_Host  output buffer size =     0.38 MiB
0.00.031.329 I llama_kv_cache:    Vulkan0 KV buffer size =    47.81 MiB
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
"""
# As common/fit.cpp of b11434 writes it for a card.
TABLE = """\
6.04 I cmn: | memory breakdown [MiB]  | total    free     self   model   context   compute    unaccounted |
6.04 I cmn: |   - CUDA0 (RTX 3090)    | 24109 = 12101 + (11400 =  9000 +    1800 +     600) +         608 |
6.04 I cmn: |   - Host                |                    340 =   300 +       0 +      40                |
"""


def captured(name: str) -> MemoryLog:
    with (LOGS / f"b11434-{name}.log").open(encoding="utf-8") as file:
        return read_memory_log(file)


def told(log: MemoryLog) -> dict[tuple[str, str], float]:
    return {(each.device, str(each.part)): round(each.bytes / MIB, 2) for each in log.buffers}


def test_a_whole_log() -> None:
    log = captured("smollm2")
    assert told(log) == {
        ("CPU_Mapped", "model"): 92.10,
        ("CPU", "output"): 0.38,
        ("CPU", "context"): 47.81,
        ("CPU", "compute"): 16.67,
    }
    assert not log.is_summary
    assert not any(each.on_card for each in log.buffers)


def test_both_caches_of_a_model_with_sliding_layers_count() -> None:
    log = captured("gemma3")
    assert told(log)["CPU", "context"] == pytest.approx(12.75 + 15.94, abs=0.01)
    assert log.total_bytes(EnginePart.MODEL) == pytest.approx((235.16 + 12.66) * MIB, abs=MIB / 100)


def test_the_lines_and_the_table_of_a_log_agree() -> None:
    """Its own summary, in whole MiB rounded down, is made of the same buffers."""
    with (LOGS / "b11434-gemma3.log").open(encoding="utf-8") as file:
        lines = [line for line in file if "buffer size" not in line]
    summary, exact = read_memory_log(lines), captured("gemma3")
    assert summary.is_summary
    for part in (EnginePart.MODEL, EnginePart.CONTEXT, EnginePart.COMPUTE):
        by_table, by_lines = summary.total_bytes(part), exact.total_bytes(part)
        assert by_table is not None and by_lines is not None
        assert 0 <= by_lines - by_table < 2 * MIB  # two rows


def test_at_its_usual_verbosity_an_engine_says_nothing() -> None:
    assert captured("smollm2-usual") == MemoryLog()
    assert MemoryLog().total_bytes(EnginePart.MODEL) is None


def test_a_card_a_draft_and_a_projector() -> None:
    log = read_memory_log(VULKAN.splitlines())
    assert told(log) == {
        ("CPU_Mapped", "model"): 92.10,
        ("Vulkan0", "model"): 7.50,
        ("Vulkan_Host", "output"): 0.38,
        ("Vulkan0", "context"): 47.81 + 2.25 + 4.00,
        ("Vulkan0", "compute"): 9.35 + 5.00,  # reserved anew, and that of the draft
        ("Vulkan_Host", "compute"): 3.00,
        ("Vulkan0", "projector"): 0.28,
        ("Vulkan0", "projector graph"): 0.09,
    }
    assert log.total_bytes(EnginePart.COMPUTE, on_card=True) == pytest.approx(14.35 * MIB, abs=MIB / 100)
    assert log.total_bytes(EnginePart.COMPUTE, on_card=False) == 3 * MIB


def test_the_table_of_a_card() -> None:
    log = read_memory_log(TABLE.splitlines())
    assert log.is_summary
    assert told(log) == {
        ("CUDA0", "model"): 9000,
        ("CUDA0", "context"): 1800,
        ("CUDA0", "compute"): 600,
        ("Host", "model"): 300,
        ("Host", "context"): 0,
        ("Host", "compute"): 40,
    }
    assert [each.on_card for each in log.buffers] == [True, True, True, False, False, False]


def test_of_several_tables_the_last_counts() -> None:
    """The first is that of a trial, where an engine fits itself."""
    twice = [*TABLE.splitlines(), *TABLE.replace("9000", "8000").splitlines()]
    assert read_memory_log(twice).total_bytes(EnginePart.MODEL, on_card=True) == 8000 * MIB


@pytest.mark.parametrize(
    "line",
    [
        "load_tensors: CUDA0 model buffer size = many MiB",
        "load_tensors: CUDA0 model buffer size = 1.0 MiB and more",
        "load_tensors: CUDA0 model buffer size = -1.0 MiB",
        "a prompt says: x model buffer size = 99999999999 MiB",
        "|   - CUDA0 (RTX 3090)    | 1 = 1 + (3 = 1 + 1 + 1) + 1 |",  # of no table
        "x" * 5000 + " load_tensors: CUDA0 model buffer size = 1.0 MiB",
    ],
)
def test_what_is_no_such_line_is_passed_over(line: str) -> None:
    assert read_memory_log([line]) == MemoryLog()


@given(st.lists(st.text() | st.sampled_from([*VULKAN.splitlines(), *TABLE.splitlines()])))
def test_no_log_breaks_it(lines: list[str]) -> None:
    assert all(each.bytes >= 0 for each in read_memory_log(lines).buffers)
