"""Shapes of the tensors of a block that keeps a state, by the kind of its mixer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lllm3090d.checkpoints.engine_rules import Mixer

Shape = tuple[int, ...]
_PLAMO2_TIME_STEP = 64  # values of its time step, or a sixteenth of the embedding
_MAMBA = ("ssm_in.weight", "ssm_conv1d.weight", "ssm_x.weight", "ssm_a", "ssm_d", "ssm_out.weight")
# What makes a block one that keeps a state; the engine demands more, which no price depends on.
STATE_TENSORS: Mapping[Mixer, tuple[str, ...]] = {
    Mixer.MAMBA: _MAMBA,
    Mixer.MAMBA2: ("ssm_in.weight", "ssm_conv1d.weight", "ssm_a", "ssm_d", "ssm_out.weight"),
    Mixer.PLAMO2: _MAMBA,
    Mixer.DELTA_NET: ("ssm_conv1d.weight", "ssm_a", "ssm_norm.weight", "ssm_out.weight"),
    Mixer.SHORT_CONVOLUTION: tuple(f"shortconv.{name}.weight" for name in ("conv", "in_proj", "out_proj")),
    Mixer.KDA: tuple(f"ssm_conv1d_{letter}.weight" for letter in "qkv"),
    Mixer.ANY: (),
}


@dataclass(frozen=True, slots=True)
class StateWidths:
    """What the file says of its states; 0 where it says nothing.

    Attributes:
        embedding: its length.
        kernel: values of a convolution.
        inner, state, groups: of ``ssm.``.
        rank: ``ssm.time_step_rank``, which are the heads except of Mamba-1.
        taps: values of a short convolution.
        delta_heads, delta_length: heads of Kimi delta attention and values of each.
    """

    embedding: int
    kernel: int
    inner: int
    state: int
    groups: int
    rank: int
    taps: int
    delta_heads: int
    delta_length: int


def state_shapes(mixer: Mixer, widths: StateWidths) -> Mapping[str, Shape]:
    """Shapes by name; nothing of a mixer that is not compared."""
    shapes = _SHAPES.get(mixer)
    return {} if shapes is None else shapes(widths)


def _mamba(w: StateWidths) -> dict[str, Shape]:
    return {
        "ssm_in.weight": (w.embedding, 2 * w.inner),
        "ssm_conv1d.weight": (w.kernel, w.inner),
        "ssm_x.weight": (w.inner, w.rank + 2 * w.state),
        "ssm_dt.weight": (w.rank, w.inner),
        "ssm_a": (w.state, w.inner),
        "ssm_d": (w.inner,),
        "ssm_out.weight": (w.inner, w.embedding),
    }


def _mamba2(w: StateWidths) -> dict[str, Shape]:
    channels = w.inner + 2 * w.groups * w.state
    return {
        "ssm_in.weight": (w.embedding, w.inner + channels + w.rank),
        "ssm_conv1d.weight": (w.kernel, channels),
        "ssm_a": (1, w.rank),
        "ssm_d": (1, w.rank),
        "ssm_norm.weight": (w.inner // max(w.groups, 1), w.groups),
        "ssm_out.weight": (w.inner, w.embedding),
    }


def _plamo2(w: StateWidths) -> dict[str, Shape]:
    step = max(_PLAMO2_TIME_STEP, w.embedding // 16)
    return {
        "ssm_in.weight": (w.embedding, 2 * w.inner),
        "ssm_conv1d.weight": (w.kernel, w.inner),
        "ssm_x.weight": (w.inner, step + 2 * w.state),
        "ssm_dt.weight": (step, w.rank),
        "ssm_a": (w.rank,),
        "ssm_d": (w.rank,),
        "ssm_out.weight": (w.inner, w.embedding),
    }


def _delta_net(w: StateWidths) -> dict[str, Shape]:
    values = w.state * w.rank
    channels = 2 * w.state * w.groups + values
    return {
        "attn_qkv.weight": (w.embedding, channels),
        "attn_gate.weight": (w.embedding, values),
        "ssm_in.weight": (w.embedding, channels + values),  # of older files: both of them in one
        "ssm_conv1d.weight": (w.kernel, channels),
        "ssm_a": (w.rank,),
        "ssm_norm.weight": (w.state,),
        "ssm_alpha.weight": (w.embedding, w.rank),
        "ssm_beta.weight": (w.embedding, w.rank),
        "ssm_ba.weight": (w.embedding, 2 * w.rank),
        "ssm_out.weight": (values, w.embedding),
    }


def _short_convolution(w: StateWidths) -> dict[str, Shape]:
    return {
        "shortconv.conv.weight": (w.taps, w.embedding),
        "shortconv.in_proj.weight": (w.embedding, 3 * w.embedding),
        "shortconv.out_proj.weight": (w.embedding, w.embedding),
    }


def _delta_attention(w: StateWidths) -> dict[str, Shape]:
    inner = w.delta_length * w.delta_heads
    return {
        **{f"attn_{letter}.weight": (w.embedding, inner) for letter in "qkv"},
        **{f"ssm_conv1d_{letter}.weight": (w.kernel, 1, inner) for letter in "qkv"},
        "ssm_beta.weight": (w.embedding, w.delta_heads),
        "ssm_norm.weight": (w.delta_length,),
        "attn_output.weight": (inner, w.embedding),
    }


_SHAPES: Mapping[Mixer, Callable[[StateWidths], dict[str, Shape]]] = {
    Mixer.MAMBA: _mamba,
    Mixer.MAMBA2: _mamba2,
    Mixer.PLAMO2: _plamo2,
    Mixer.DELTA_NET: _delta_net,
    Mixer.SHORT_CONVOLUTION: _short_convolution,
    Mixer.KDA: _delta_attention,
}
