"""Causes of an end, by the logs of real engines: of public reports, in small, and of the pinned release."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.engines.crash_causes import (
    KINDS,
    LINES_OF_INTEREST,
    CrashCause,
    Ending,
    Finding,
    Retry,
    classify,
)

pytestmark = pytest.mark.unit

LOGS = Path(__file__).parent.parent / "data" / "crash_logs"
ERRORS_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"


@dataclass(frozen=True)
class Sample:
    name: str
    ending: Ending
    cause: CrashCause
    origin: str

    @property
    def lines(self) -> list[str]:
        return (LOGS / f"{self.name}.txt").read_text(encoding="utf-8").strip("\n").splitlines()


def read_table() -> list[Sample]:
    samples = []
    for row in (LOGS / "table.tsv").read_text(encoding="utf-8").splitlines():
        if row.startswith("#"):
            continue
        name, result, how, number, cause, origin = row.split("\t")
        status, by = (int(number), None) if how == "exited" else (None, int(number))
        ended = Ending(result, exit_status=status, signal_number=by)
        samples.append(Sample(name, ended, CrashCause(cause), origin))
    return samples


SAMPLES = read_table()


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.name)
def test_the_cause_of_a_sample(sample: Sample) -> None:
    found = classify(sample.ending, sample.lines)
    assert found.cause is sample.cause
    if found.line is not None:
        assert found.line in sample.lines


def test_there_are_enough_samples_and_each_cause_has_one() -> None:
    assert len(SAMPLES) >= 25
    assert {path.stem for path in LOGS.glob("*.txt")} == {sample.name for sample in SAMPLES}
    # No end of an engine says that it hung.
    assert set(Counter(sample.cause for sample in SAMPLES)) == set(CrashCause) - {CrashCause.HUNG}
    assert sum(sample.origin.startswith("issue") for sample in SAMPLES) >= 25


def test_each_cause_is_explained_and_has_a_row_on_the_page_of_errors() -> None:
    assert set(KINDS) == set(CrashCause)
    page = ERRORS_PAGE.read_text(encoding="utf-8")
    for cause, kind in KINDS.items():
        assert kind.advice.strip()
        again = {
            Retry.NEVER: "no",
            Retry.SMALLER_ONCE: "once, with a smaller plan",
            Retry.ONCE: "once",
            Retry.YES: "yes",
        }
        assert f"| `{cause}` | it {kind.title} | {again[kind.retry]} |" in page


def test_what_trying_again_cannot_help() -> None:
    assert {cause for cause, kind in KINDS.items() if not kind.is_transient} == {
        CrashCause.BAD_FILE,
        CrashCause.UNKNOWN_FLAG,
        CrashCause.MISSING_LIBRARY,
        CrashCause.WRONG_BUILD,
        CrashCause.ILLEGAL_INSTRUCTION,
        CrashCause.SETUP_FAILED,
    }


OOM = "0.05.1 E alloc_tensor_range: failed to allocate CUDA0 buffer of size 22901023744"


@pytest.mark.parametrize(
    ("ending", "cause"),
    [
        (Ending("oom-kill", signal_number=signal.SIGKILL), CrashCause.OUT_OF_HOST_MEMORY),
        (Ending("signal", signal_number=signal.SIGKILL), CrashCause.KILLED),
        (Ending("signal", signal_number=signal.SIGILL), CrashCause.ILLEGAL_INSTRUCTION),
        (Ending("timeout", signal_number=signal.SIGKILL), CrashCause.UNKNOWN),
        (Ending("exit-code", exit_status=203), CrashCause.MISSING_LIBRARY),
        (Ending("exit-code", exit_status=204), CrashCause.OUT_OF_HOST_MEMORY),
        (Ending("exit-code", exit_status=228), CrashCause.SETUP_FAILED),
        # The line decides.
        (Ending("core-dump", signal_number=signal.SIGABRT), CrashCause.OUT_OF_DEVICE_MEMORY),
        (Ending("exit-code", exit_status=1), CrashCause.OUT_OF_DEVICE_MEMORY),
        (Ending(), CrashCause.OUT_OF_DEVICE_MEMORY),
    ],
)
def test_what_the_system_knows_outranks_the_lines(ending: Ending, cause: CrashCause) -> None:
    assert classify(ending, [OOM]).cause is cause


@pytest.mark.parametrize(
    ("ending", "cause"),
    [
        (Ending("signal", signal_number=signal.SIGSYS), CrashCause.SETUP_FAILED),
        (Ending("exit-code", exit_status=127), CrashCause.MISSING_LIBRARY),
        (Ending("resources"), CrashCause.SETUP_FAILED),
        (Ending("success", exit_status=0), CrashCause.KILLED),
        (Ending("success", exit_status=0, asked_for=True), CrashCause.UNKNOWN),
        (Ending("signal", signal_number=signal.SIGKILL, asked_for=True), CrashCause.UNKNOWN),
        (Ending("signal", signal_number=40), CrashCause.UNKNOWN),
        (Ending("a result of a later systemd"), CrashCause.UNKNOWN),
        (Ending(), CrashCause.UNKNOWN),
    ],
)
def test_without_lines_the_status_decides(ending: Ending, cause: CrashCause) -> None:
    assert classify(ending) == Finding(cause)


def test_a_buffer_without_a_name_is_the_cards_only_on_a_card() -> None:
    lines = [
        "E llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache"
    ]
    exited = Ending("exit-code", exit_status=1)
    assert classify(exited, lines).cause is CrashCause.OUT_OF_DEVICE_MEMORY
    on_host = Ending("exit-code", exit_status=1, on_card=False)
    assert classify(on_host, lines).cause is CrashCause.OUT_OF_HOST_MEMORY
    # Where its place was said before, that counts.
    lines.insert(
        0, "E ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 11796480"
    )
    assert classify(exited, lines).cause is CrashCause.OUT_OF_HOST_MEMORY


def test_lines_from_before_it_served_say_nothing_of_its_end() -> None:
    lines = [OOM, "I srv  llama_server: listening on unix:///run/a.sock"]
    assert classify(Ending("exit-code", exit_status=3), lines).cause is CrashCause.UNKNOWN
    assert (
        classify(Ending("exit-code", exit_status=3), [*lines, OOM]).cause is CrashCause.OUT_OF_DEVICE_MEMORY
    )


def test_only_the_last_lines_count() -> None:
    long_ago = [OOM, *(["I slot update_slots: id  0"] * LINES_OF_INTEREST)]
    assert classify(Ending("exit-code", exit_status=3), long_ago).cause is CrashCause.UNKNOWN
    assert classify(Ending("exit-code", exit_status=3), long_ago[:-1]).line == OOM


def test_an_assertion_after_its_reason_is_not_the_reason() -> None:
    lines = ["E graph_reserve: failed to allocate compute buffers", "ggml.c:7: GGML_ASSERT(buffer) failed"]
    aborted = Ending("core-dump", signal_number=signal.SIGABRT)
    assert classify(aborted, lines) == Finding(CrashCause.OUT_OF_DEVICE_MEMORY, lines[0])
    assert classify(aborted, lines[1:]) == Finding(CrashCause.ENGINE_FAULT, lines[1])


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("std::bad_alloc", CrashCause.OUT_OF_HOST_MEMORY),
        ("vk::DeviceLostError", CrashCause.DEVICE_LOST),
        ("vk::SystemError", CrashCause.ENGINE_FAULT),
    ],
)
def test_what_was_thrown_tells_the_cause(what: str, cause: CrashCause) -> None:
    lines = [f"terminate called after throwing an instance of '{what}'"]
    assert classify(Ending("exit-code", exit_status=3), lines).cause is cause


@pytest.mark.parametrize(
    ("xid", "cause"),
    [("79, GPU has fallen off", CrashCause.DEVICE_LOST), ("119, Timeout", CrashCause.DEVICE_LOST)]
    # The process did wrong, or was only cleaned up after.
    + [(text, CrashCause.UNKNOWN) for text in ("13, Graphics Exception", "45, Ch 0000", "790, no such one")],
)
def test_an_xid_of_the_card_and_one_of_a_process(xid: str, cause: CrashCause) -> None:
    lines = [f"NVRM: Xid (PCI:0000:02:00): {xid}"]
    assert classify(Ending("exit-code", exit_status=3), lines).cause is cause


@given(
    st.lists(st.text(max_size=60), max_size=60),
    st.integers(0, 255) | st.none(),
    st.integers(1, 64) | st.none(),
)
def test_anything_can_be_classified(lines: list[str], status: int | None, number: int | None) -> None:
    found = classify(Ending("exit-code", exit_status=status, signal_number=number), lines)
    assert found.kind is KINDS[found.cause]
    assert found.line is None or found.line in lines


def test_an_error_of_the_card_explains_what_looks_like_the_engine_s_own_fault() -> None:
    xid = "Xid 31: a process used memory of the card that is not its own"
    aborted = Ending("core-dump", signal_number=signal.SIGABRT)
    assertion = "ggml-cuda.cu:96: GGML_ASSERT(ptr) failed"
    assert classify(aborted, [assertion], xid) == Finding(CrashCause.DEVICE_LOST, assertion, xid)
    assert classify(aborted, [], xid) == Finding(CrashCause.DEVICE_LOST, None, xid)
    assert classify(Ending("exit-code", exit_status=9), [], xid).cause is CrashCause.DEVICE_LOST
    # It does not overrule an explanation.
    for ending, lines, cause in (
        (aborted, [OOM], CrashCause.OUT_OF_DEVICE_MEMORY),
        (Ending("oom-kill", signal_number=signal.SIGKILL), [], CrashCause.OUT_OF_HOST_MEMORY),
        (Ending("signal", signal_number=signal.SIGTERM), [assertion], CrashCause.KILLED),
    ):
        assert classify(ending, lines, xid) == classify(ending, lines)
        assert classify(ending, lines, xid).cause is cause
