"""Plans beside the engine and beside a real card.

    python -m bench.planning_truth
        compute buffers of the recorded dry runs (tests/data/engine_truth.json.gz), and the totals of a card with the
        margin; what a 27B took of an RTX 3090 as published, use and largest context
    python -m bench.planning_truth --contexts
        also the largest context by bisection with the installed engine's dry run, beside the plan's: fourteen models,
        one slot on a stand-in for CUDA and three on one for Vulkan, three budgets each

Exit status 1 when a row is outside its limits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench._support import engine_dir, table
from bench.dry_run import DryRunUnavailableError, dry_run
from bench.graph_truth import BOUNDS, graph_checks, graph_table
from bench.largest_context import LEAST_PERCENT, context_table, findings
from bench.published_27b import (
    CEILING_PERCENT,
    WITH_MARGINS,
    WITHOUT_MARGINS,
    Published,
    is_close,
    published,
)
from lllm3090d.planning.units import MIB
from lllm3090d.settings import Settings


def print_graphs() -> bool:
    """Print the first table; whether every row is within its limits or named."""
    checks = graph_checks()
    print(graph_table(checks))
    outside = [check for check in checks if not check.is_close and not check.reason]
    uncovered = [check for check in checks if not check.is_covered]
    print(
        "\noutside: rows whose formula is further from the engine's compute buffer than 5 % and than 16 MiB. total:"
        "\nweights, context and graph with the margin, above the engine's: never below, at most 3 % or 96 MiB above."
    )
    for architecture, reason in BOUNDS.items():
        print(f"named: {architecture}: {reason}.")
    for check in (*outside, *uncovered):
        print(f"OUTSIDE: {check.row}: formula {check.error:+} B, total {check.above:+} B")
    return not outside and not uncovered


def print_uses(document: Published) -> bool:
    """Print published and predicted use of the card; whether every prediction is close."""
    rows, close = [], True
    for use in (document.fitted, *document.predicted):
        predicted = document.predicted_bytes(use)
        close = close and is_close(predicted, use.used_bytes)
        rows.append(
            (
                str(use.backend),
                str(use.draft_cache),
                f"{use.context_tokens:,}",
                f"{use.used_bytes / MIB:,.0f}",
                f"{predicted / MIB:,.0f}",
                f"{(predicted - use.used_bytes) / MIB:+.0f}" if use is not document.fitted else "fitted",
            )
        )
    print(table(("backend", "draft cache", "context", "published MiB", "predicted MiB", ""), rows))
    print(f"foreign memory: {document.foreign_bytes / MIB:,.0f} MiB")
    return close


def print_ceilings(document: Published) -> bool:
    """Print where it died and what is planned; whether all is within the limits, with the reserve of the settings."""
    reserves = (Settings().driver_reserve_mib * MIB, document.driver_bytes)
    rows, good = [], True
    for ceiling in document.ceilings:
        cells = [str(ceiling.backend), str(ceiling.draft_cache)]
        cells += [f"{ceiling.largest_ran_tokens:,}", f"{ceiling.smallest_died_tokens:,}"]
        for driver in reserves:
            bare = document.planned_tokens(ceiling, WITHOUT_MARGINS, driver)
            usual = document.planned_tokens(ceiling, WITH_MARGINS, driver)
            cells += [f"{bare:,}", f"{bare / ceiling.largest_ran_tokens - 1:+.1%}", f"{usual:,}"]
            if driver == reserves[0]:
                good = good and ceiling.is_met(bare) and usual < ceiling.largest_ran_tokens
        rows.append(cells)
    heads = ["backend", "draft cache", "ran", "died"]
    for driver in reserves:
        heads += [f"driver {driver // MIB}: no margins", "of ran", "margins"]
    print(table(heads, rows))
    margins = WITH_MARGINS.margins
    print(
        f"no margins: no floor, no slack, no percentage. margins: workspace at least"
        f" {WITH_MARGINS.workspace_reserve_mib} MiB, slack {margins.long_context_slack_mib} MiB,"
        f" {margins.compute_residuals} E U + {margins.compute_percent} % of the graph.\n"
        f"Limits hold for a driver reserve of {reserves[0] // MIB} MiB, the setting for a card that does not tell:"
        f" within {CEILING_PERCENT} % of what ran and below what died; with margins below both."
    )
    return good


def print_contexts() -> bool:
    """Print the largest contexts of the engine and of the plan; whether every one is within its limits."""
    try:
        with dry_run(engine_dir()) as engine:
            found = list(findings(engine))
    except DryRunUnavailableError as error:
        print(f"The installed engine cannot be asked for bytes: {error}")
        return False
    print(context_table(found))
    print(
        "engine, plan: the largest window of a slot, tokens, with weights and context alone in so many MiB;\n"
        f"lowest: least share of the engine's that is planned, which is to be {LEAST_PERCENT} % and never above 100 %."
    )
    return all(each.holds for each in found)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="compare plans with the engine and with a real card")
    parser.add_argument("--contexts", action="store_true", help="also ask the installed engine")
    options = parser.parse_args(arguments)
    good = print_graphs()
    print()
    document = published()
    good = print_uses(document) and good
    print()
    good = print_ceilings(document) and good
    if options.contexts:
        print()
        good = print_contexts() and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
