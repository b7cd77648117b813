"""ProjectorFacts: what planning needs to know of the file that lets a model see or hear (``--mmproj``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from lllm3090d.checkpoints.cursor import printable
from lllm3090d.checkpoints.gguf_format import gguf_format
from lllm3090d.checkpoints.header import GgufHeader, read_header
from lllm3090d.checkpoints.metadata import Keys
from lllm3090d.checkpoints.weights import NOTHING, WeightBytes, total, weigh
from lllm3090d.errors import ErrorCode, LlmError

ARCHITECTURE = "clip"  # ``general.architecture`` of every projector, whatever it lets a model do
# Patches of a side of the square that becomes one token, where the file does not say: the engine's own (tools/mtmd).
_MERGE_SIZES = {
    "mlp": 1,
    "janus_pro": 1,
    "pixtral": 1,
    "gemma3": 4,
    "qwen2vl_merger": 2,
    "qwen2.5vl_merger": 2,
    "qwen3vl_merger": 2,
    "glm4v": 2,
}
# Those that make every image, or every tile of a large one, a square of ``image_size``.
_SQUARES = frozenset({"mlp", "janus_pro", "gemma3", "idefics3", "internvl", "llama4"})


@dataclass(frozen=True, slots=True)
class ProjectorWeights:
    """The tensors of a projector.

    Attributes:
        vision: of the image encoder.
        audio: of the audio encoder.
        projection: of what turns their results into embeddings of the model.
        other: everything else.
    """

    vision: WeightBytes = NOTHING
    audio: WeightBytes = NOTHING
    projection: WeightBytes = NOTHING
    other: WeightBytes = NOTHING

    @property
    def all(self) -> WeightBytes:
        """All of them."""
        return total(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class VisionFacts:
    """The image encoder; every number is 0 where the file does not say.

    Attributes:
        image_size: pixels of a side of the square that every image becomes, or that is the usual one.
        image_max_pixels: of the largest image of an encoder that takes several sizes.
        patch_size: pixels of a side of a patch.
        merge_size: patches of a side of the square that becomes one token.
        embedding_length, feed_forward_length: values.
        head_count: of attention.
        block_count: layers.
    """

    image_size: int = 0
    image_max_pixels: int = 0
    patch_size: int = 0
    merge_size: int = 0
    embedding_length: int = 0
    feed_forward_length: int = 0
    head_count: int = 0
    block_count: int = 0


@dataclass(frozen=True, slots=True)
class ProjectorFacts:
    """A projector as planning sees it.

    Attributes:
        projector_type: such as ``gemma3``; that of the image encoder where there are two, empty unknown.
        projection_length: values of an embedding it makes, that of its model; 0 where the file does not say.
        weights: bytes of its tensors by use.
        vision: its image encoder; None where it only hears.
        hears: it has an audio encoder.
        file_bytes: size on disk.
    """

    projector_type: str
    projection_length: int
    weights: ProjectorWeights
    vision: VisionFacts | None
    hears: bool
    file_bytes: int

    @property
    def merge_size(self) -> int:
        """Patches of a side of the square that becomes one token; 0 where nobody knows."""
        if self.vision is None:
            return 0
        return self.vision.merge_size or _MERGE_SIZES.get(self.projector_type, 0)

    @property
    def image_tokens(self) -> int:
        """Tokens of an image, or of each tile of a large one; 0 where that depends on the image, or is unknown."""
        if self.vision is None or self.projector_type not in _SQUARES:
            return 0
        side = self.vision.patch_size * self.merge_size
        return (self.vision.image_size // side) ** 2 if side else 0


def read_projector(path: Path, read: Callable[[Path], GgufHeader] = read_header) -> ProjectorFacts:
    """Read the facts of a projector from its header; blocks for milliseconds.

    Args:
        path: the file; the engine reads a projector from one.
        read: where the header comes from.

    Raises:
        LlmError: BAD_CHECKPOINT naming the file and the key or offset, or for what is no projector.
    """
    return projector_of_header(read(path))


def projector_of_header(header: GgufHeader) -> ProjectorFacts:
    """The facts of a header; raises as :func:`read_projector`."""
    keys = Keys(header)
    architecture = keys.text("general.architecture")
    if architecture != ARCHITECTURE or not header.tensors:
        found = "it has no tensors" if architecture == ARCHITECTURE else f"it is a {printable(architecture)}"
        path = printable(header.path)
        raise LlmError(
            ErrorCode.BAD_CHECKPOINT,
            f"{path} is not a usable projector: {found}.",
            hint=f"Name the mmproj file that belongs to the model; its architecture is {ARCHITECTURE}.",
            path=path,
        )
    weights = _weights(header)
    hears = weights.audio.stored > 0 or bool(keys.value("clip.has_audio_encoder"))
    # Older files, all of them for images, do not say what they are for.
    sees = weights.vision.stored > 0 or bool(keys.value("clip.has_vision_encoder")) or not hears
    types = (keys.text(f"clip.{part}projector_type", "") for part in ("", "vision.", "audio."))
    lengths = (keys.number(f"clip.{part}.projection_dim", 0) for part in ("vision", "audio"))
    return ProjectorFacts(
        projector_type=printable(next(filter(None, types), "")),
        projection_length=next(filter(None, lengths), 0),
        weights=weights,
        vision=_vision(keys) if sees else None,
        hears=hears,
        file_bytes=header.file_bytes,
    )


def _vision(keys: Keys) -> VisionFacts:
    def number(name: str) -> int:
        return keys.number(f"clip.vision.{name}", 0)

    return VisionFacts(
        image_size=number("image_size"),
        image_max_pixels=number("image_max_pixels"),
        patch_size=number("patch_size"),
        merge_size=number("spatial_merge_size") or number("projector.scale_factor"),
        embedding_length=number("embedding_length"),
        feed_forward_length=number("feed_forward_length"),
        head_count=number("attention.head_count"),
        block_count=number("block_count"),
    )


def _weights(header: GgufHeader) -> ProjectorWeights:
    blocks = {
        kind.name: (kind.block_values, kind.block_bytes) for kind in gguf_format().tensor_types.values()
    }
    places: dict[str, WeightBytes] = {}
    for tensor in header.tensors:
        place = _place(tensor.name)
        places[place] = places.get(place, NOTHING) + weigh(tensor, blocks.get(tensor.type_name))
    return ProjectorWeights(**places)


def _place(name: str) -> str:
    """Field of :class:`ProjectorWeights` for a tensor's name."""
    beginnings = {"v.": "vision", "a.": "audio", "mm.": "projection", "resampler.": "projection"}
    return next((place for start, place in beginnings.items() if name.startswith(start)), "other")
