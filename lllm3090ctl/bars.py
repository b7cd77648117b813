"""How many cells of a bar each of its parts gets. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def widths(weights: Sequence[int], cells: int) -> list[int]:
    """Cells for each part, together exactly so many: by the largest remainders, and one at least where there is any.

    Args:
        weights: shares of the whole; none is negative.
        cells: of the bar.

    Where there are more parts than cells, the last ones get none.
    """
    total = sum(weights)
    if not total or cells <= 0:
        return [0] * len(weights)
    shown = [weight * cells // total for weight in weights]
    order = sorted(range(len(weights)), key=lambda i: (-(weights[i] * cells % total), i))
    for i in order[: cells - sum(shown)]:
        shown[i] += 1
    for i, weight in enumerate(weights):
        if weight and not shown[i]:
            widest = max(range(len(shown)), key=lambda j: (shown[j], -j))
            if shown[widest] <= 1:
                break
            shown[widest] -= 1
            shown[i] = 1
    return shown
