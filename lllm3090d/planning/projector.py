"""What a projector costs beside its model: its tensors on the card or in host memory, and its graph. Pure."""

from __future__ import annotations

from lllm3090d.checkpoints.facts import ProjectorFacts, VisionFacts
from lllm3090d.engines.capabilities import Backend
from lllm3090d.planning.placement import Split, memory_of
from lllm3090d.planning.units import MIB

# Of the buffers of an encoder whose dimensions are missing: a 1.19 GB projector occupied 1376 MiB on an RTX 3090
# while it rested, and more with an image.
UNKNOWN_GRAPH_BYTES = 1024 * MIB
F32_BYTES = 4
COPIES_TENTHS = 13  # 1.3 times the tensors of the formula: copies alive between them; judgement
DEFAULT_FEED_FORWARD = 4  # embeddings wide, where the file does not say


def projector_weights(facts: ProjectorFacts, backend: Backend, *, on_card: bool = True) -> Split:
    """Bytes of its tensors, as the engine's buffers hold them.

    Args:
        facts: the projector.
        backend: with cpu the host is the card.
        on_card: False for ``--no-mmproj-offload``.
    """
    weights = facts.weights.all
    if backend is Backend.CPU:
        return Split(weights.host, 0)
    return Split(weights.in_memory(memory_of(backend)), 0) if on_card else Split(0, weights.host)


def image_patches(vision: VisionFacts, image_max_tokens: int = 0) -> int:
    """Patches of the largest image; 0 where the file does not say enough.

    That is the usual square, or what is larger: the tokens that are allowed (``--image-max-tokens``), or else
    the pixels that the file allows. The limits that the engine has built in for some projectors are in no
    file; with these, name the tokens.

    Raises:
        ValueError: a negative number of tokens.
    """
    if image_max_tokens < 0:
        raise ValueError("an image has no negative number of tokens")
    if not vision.patch_size or not vision.image_size:
        return 0
    usual = (vision.image_size // vision.patch_size) ** 2
    allowed = vision.image_max_pixels // vision.patch_size**2
    if image_max_tokens:
        allowed = image_max_tokens * (vision.merge_size or 1) ** 2
    return max(usual, allowed)


def projector_graph_bytes(facts: ProjectorFacts, image_max_tokens: int = 0) -> int:
    """Bytes of the compute buffer of its encoders.

    1.3 x 4 x (heads x patches^2 + patches x (feed-forward + embedding)), the scores of attention that is not
    flash above all; 1024 MiB where a dimension is missing, and for an audio encoder.
    """
    size = UNKNOWN_GRAPH_BYTES if facts.hears else 0
    return size + (0 if facts.vision is None else _vision_graph_bytes(facts.vision, image_max_tokens))


def _vision_graph_bytes(vision: VisionFacts, image_max_tokens: int) -> int:
    patches = image_patches(vision, image_max_tokens)
    embedding = vision.embedding_length
    if not patches or not embedding:
        return UNKNOWN_GRAPH_BYTES
    wide = vision.feed_forward_length or DEFAULT_FEED_FORWARD * embedding
    values = (vision.head_count or 1) * patches**2 + patches * (wide + embedding)
    return F32_BYTES * values * COPIES_TENTHS // 10
