"""Damage GGUF headers at random and see that the reader does nothing but read them or refuse them.

    .venv/bin/python -m bench.fuzz_header --minutes 60

Each round takes one of a few small files, changes bytes, numbers or its length, and reads it. Whatever comes must be a
header whose tensors lie in the file, or BAD_CHECKPOINT with an offset inside it and a printable message, within limits
of time and memory. A round that breaks this is kept as a file and named with its seed. Short runs of the same kind
are among the unit tests.
"""

from __future__ import annotations

import argparse
import random
import re
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import _support as support
from lllm3090d.checkpoints.classify import Digest, digest
from lllm3090d.checkpoints.header import READER_VERSION, GgufHeader, read_header
from lllm3090d.checkpoints.header_codec import pack, unpack
from lllm3090d.errors import ErrorCode, LlmError
from tests.fakes.gguf_files import Tensor, Typed, header_bytes, model_metadata, model_tensors

TIME_LIMIT_S = 2.0
MEMORY_LIMIT_MIB = 300.0  # numpy, for writing the corpus, takes some 40 of it
SPARSE_MEMORY = Path("/dev/shm")  # noqa: S108 - files of this run only, in a directory of their own
NUMBERS = (0, 1, 2, 7, 8, 31, 32, 255, 256, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)
LARGE = (0x7FFFFFFFFFFFFFFF, 0x8000000000000000, 0xFFFFFFFFFFFFFFF8, 0xFFFFFFFFFFFFFFFF, 1 << 32, 1 << 40)

_VARIABLE = re.compile(r"'.*'|\".*\"|b['\"].*['\"]|\[[^]]*\]|/\S+|\d+")


def big_endian() -> bytes:
    """A small file for machines of the other byte order, as the gguf package writes it."""
    import numpy
    from gguf import GGUFEndian, GGUFWriter

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "m.gguf"
        writer = GGUFWriter(path, "llama", endianess=GGUFEndian.BIG)
        writer.add_uint64("llama.block_count", 2)
        writer.add_array("llama.attention.head_count_kv", [1, 2])
        writer.add_token_list(["a", "", "ccc"])
        writer.add_tensor("blk.0.attn_q.weight", numpy.zeros((4, 32), numpy.float32))
        writer.add_tensor("blk.1.attn_q.weight", numpy.zeros((4, 32), numpy.float16))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def corpus() -> list[bytes]:
    """Small files with everything a header can have."""
    every_type = {
        "general.architecture": "llama",
        **{kind: Typed(kind, 1) for kind in ("u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64")},
        "f32": Typed("f32", 0.5),
        "f64": Typed("f64", 0.5),
        "flag": True,
        "numbers": [1, 2, 3],
        "flags": [True, False],
        "tokenizer.ggml.tokens": ["a", "", "ccc", "d" * 300],
        "tokenizer.ggml.scores": Typed("f32", [0.0] * 300),
    }
    small = model_metadata(blocks=1, metadata={"llama.attention.head_count_kv": [2]})
    gemma = model_metadata("gemma3", blocks=6, metadata={"gemma3.attention.sliding_window": 512})
    odd = [
        Tensor("a", ()),
        Tensor("b", (64, 2, 2, 2), "Q8_0"),
        Tensor("blk.3.nextn.eh_proj.weight", (64, 32)),
    ]
    files = [big_endian()]
    for metadata, tensors, version in (
        (every_type, odd, 3),
        (small, model_tensors(small), 2),
        (gemma, model_tensors(gemma, tied=True), 3),
        ({"general.architecture": "clip", "general.alignment": 64}, [Tensor("mm.2.weight", (64, 64))], 3),
    ):
        alignment = 64 if "general.alignment" in metadata else 32
        head = header_bytes(metadata, tensors, version=version, alignment=alignment)
        files.append(head + bytes(sum(tensor.size_bytes + alignment for tensor in tensors)))
    return files


def damaged(data: bytes, chance: random.Random) -> bytes:
    """A copy with one to six changes, most of them in the header."""
    copy = bytearray(data)
    header_length = len(data.rstrip(b"\0")) + 64
    changes: Sequence[Callable[[int], None]] = (
        lambda at: copy.__setitem__(slice(at, at + 1), bytes([chance.randrange(256)])),
        lambda at: copy.__setitem__(slice(at, at + 4), struct.pack("<I", chance.choice(NUMBERS))),
        lambda at: copy.__setitem__(slice(at, at + 8), struct.pack("<Q", chance.choice(LARGE + NUMBERS))),
        lambda at: copy.__setitem__(slice(at, at + 8), struct.pack(">Q", chance.choice(LARGE + NUMBERS))),
        lambda at: copy.__setitem__(slice(at, at + 8), bytes(copy[at : at + 8][::-1])),
        lambda at: copy.__delitem__(slice(at, at + chance.randrange(1, 40))),
        lambda at: copy.__setitem__(slice(at, at), chance.randbytes(chance.randrange(1, 40))),
        lambda at: copy.__setitem__(slice(at, at), copy[: chance.randrange(1, header_length)]),
        lambda at: copy.__delitem__(slice(at, None)),
    )
    weights = (8, 8, 8, 4, 2, 2, 2, 1, 1)
    for change in chance.choices(changes, weights, k=chance.randrange(1, 7)):
        change(chance.randrange(min(header_length, len(copy)) + 1))
    return bytes(copy)


def check(path: Path) -> str:
    """Read the file; how it ended. Raises AssertionError, or whatever the reader should not have raised."""
    size = path.stat().st_size
    started = time.process_time()
    try:
        header = read_header(path)
    except LlmError as error:
        assert error.code is ErrorCode.BAD_CHECKPOINT, error.code
        assert 0 <= error.details["offset"] <= size, error.message
        assert error.message.isprintable(), error.message
        reason = error.message.partition(": at byte ")[2].partition(": ")[2] or error.message
        outcome = _VARIABLE.sub("*", reason)[:70]
    else:
        check_header(header, size)
        outcome = "read"
    assert time.process_time() - started < TIME_LIMIT_S, "it took too long"
    return outcome


def check_header(header: GgufHeader, size: int) -> None:
    """What was read lies in the file and goes through the cache unharmed."""
    assert all(0 <= tensor.offset <= tensor.offset + tensor.size_bytes <= size for tensor in header.tensors)
    assert header.stamp is not None
    found = digest(header)
    assert Digest.from_json(found.to_json()) == found
    again = unpack(header.path, header.stamp, pack(header))
    assert repr(again) == repr(header)  # NaN is not equal to itself


def main() -> int:
    """Fuzz and print."""
    parser = argparse.ArgumentParser(description="damage GGUF headers at random")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long (default: 60)")
    parser.add_argument("--seed", type=int, default=None, help="of the first round (default: the time)")
    options = parser.parse_args()
    seed = options.seed if options.seed is not None else time.time_ns() % 1_000_000_000
    files = corpus()
    outcomes: Counter[str] = Counter()
    ends = time.monotonic() + options.minutes * 60
    kept = Path(tempfile.gettempdir())
    print(f"reader {READER_VERSION}, first seed {seed}, {options.minutes:g} minutes", flush=True)
    where = SPARSE_MEMORY if SPARSE_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir=where) as directory:
        path = Path(directory) / "m.gguf"
        rounds = 0
        while time.monotonic() < ends:
            chance = random.Random(seed + rounds)  # noqa: S311 - not for secrets
            path.write_bytes(damaged(chance.choice(files), chance))
            try:
                outcomes[check(path)] += 1
            except Exception:
                broken = kept / f"fuzz-{seed + rounds}.gguf"
                broken.write_bytes(path.read_bytes())
                print(f"round {rounds}, seed {seed + rounds}, kept as {broken}")
                raise
            rounds += 1
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        support.table(
            ("outcome", "rounds"), [(name, str(count)) for name, count in outcomes.most_common(25)]
        )
    )
    print(f"{rounds} rounds, {len(outcomes)} different outcomes")
    return support.report_targets([support.Target("peak memory", memory_mib, MEMORY_LIMIT_MIB, "MiB")])


if __name__ == "__main__":
    sys.exit(main())
