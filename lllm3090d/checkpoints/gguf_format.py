"""Constants of the GGUF format, taken from the ``gguf`` package without its weight.

``import gguf`` pulls in numpy (0.15 s and tens of MiB, too much for a daemon that is idle).
Its module of constants needs nothing but the standard library, so that one file is executed by itself: 10 ms
and 1.3 MiB, and only when the first header is read. The package's ``__init__`` never runs.
"""

from __future__ import annotations

import functools
import importlib.util
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import MappingProxyType, ModuleType

from lllm3090d.errors import ErrorCode, LlmError


@dataclass(frozen=True, slots=True)
class TensorType:
    """How values of a tensor type are stored: ``block_values`` of them in ``block_bytes``."""

    name: str
    block_values: int
    block_bytes: int


@dataclass(frozen=True, slots=True)
class GgufFormat:
    """The part of the format a header reader needs.

    Attributes:
        scalars: metadata value type -> letter of the ``struct`` module and bytes of one value.
        bool_type, string_type, array_type: the other metadata value types (a bool also has a letter).
        tensor_types: code in a tensor info -> its storage.
        type_names: metadata value type -> its name in the engine, e.g. 4 -> ``u32``.
        array_names: the same for arrays of such elements, e.g. ``[u32]``.
        file_types: ``general.file_type`` -> label, e.g. 3 -> ``Q4_1``.
    """

    scalars: Mapping[int, tuple[str, int]]
    bool_type: int
    string_type: int
    array_type: int
    tensor_types: Mapping[int, TensorType]
    type_names: Mapping[int, str]
    array_names: Mapping[int, str]
    file_types: Mapping[int, str]


def _constants_file() -> Path:
    package = importlib.util.find_spec("gguf")  # finds it without importing it
    for folder in (package.submodule_search_locations or ()) if package else ():
        file = Path(folder) / "constants.py"
        if file.is_file():
            return file
    raise LlmError(
        ErrorCode.INTERNAL,
        "The Python package gguf is not installed, so no model file can be read.",
        hint="Install lllm3090 again; gguf is one of its dependencies.",
    )


def _load_constants() -> ModuleType:
    loader = SourceFileLoader("_lllm3090_gguf_constants", str(_constants_file()))
    module = ModuleType(loader.name)
    loader.exec_module(module)
    return module


@functools.cache
def format_version() -> str:
    """Differs whenever the constants do, for caches of what was read with them; does not read them.

    Raises:
        LlmError: INTERNAL when the ``gguf`` package is missing.
    """
    status = _constants_file().stat()
    return f"{status.st_size}-{status.st_mtime_ns}"


@functools.cache
def gguf_format() -> GgufFormat:
    """The constants; the first call reads them.

    Raises:
        LlmError: INTERNAL when the ``gguf`` package is missing.
    """
    constants = _load_constants()
    kinds = constants.GGUFValueType
    letters = {
        kinds.UINT8: "B",
        kinds.INT8: "b",
        kinds.UINT16: "H",
        kinds.INT16: "h",
        kinds.UINT32: "I",
        kinds.INT32: "i",
        kinds.FLOAT32: "f",
        kinds.BOOL: "B",  # any byte but 0 is true, as the engine reads it
        kinds.UINT64: "Q",
        kinds.INT64: "q",
        kinds.FLOAT64: "d",
    }
    type_names = {
        kinds.UINT8: "u8",
        kinds.INT8: "i8",
        kinds.UINT16: "u16",
        kinds.INT16: "i16",
        kinds.UINT32: "u32",
        kinds.INT32: "i32",
        kinds.FLOAT32: "f32",
        kinds.BOOL: "bool",
        kinds.STRING: "str",
        kinds.UINT64: "u64",
        kinds.INT64: "i64",
        kinds.FLOAT64: "f64",
    }
    sizes: Mapping[int, tuple[int, int]] = constants.GGML_QUANT_SIZES
    names = {int(kind): str(kind.name) for kind in constants.GGMLQuantizationType}
    return GgufFormat(
        scalars=MappingProxyType(
            {int(kind): (letter, struct.calcsize(f"<{letter}")) for kind, letter in letters.items()}
        ),
        bool_type=int(kinds.BOOL),
        string_type=int(kinds.STRING),
        array_type=int(kinds.ARRAY),
        tensor_types=MappingProxyType(
            {int(code): TensorType(names[int(code)], values, size) for code, (values, size) in sizes.items()}
        ),
        type_names=MappingProxyType({int(kind): name for kind, name in type_names.items()}),
        array_names=MappingProxyType({int(kind): f"[{name}]" for kind, name in type_names.items()}),
        file_types=MappingProxyType(
            {
                int(kind): str(kind.name).removeprefix("MOSTLY_").removeprefix("ALL_")
                for kind in constants.LlamaFileType
                if kind.name != "GUESSED"
            }
        ),
    )
