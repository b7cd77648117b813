"""The gateway's figures as metrics of Prometheus, made anew for each scrape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from lllm3090d.gateway.figures import GatewayFigures
from lllm3090d.gateway.record import Outcome
from lllm3090d.gateway.turns import Turns
from lllm3090d.serving.metrics import counter, gauge, histogram

MODEL = ("model",)


def families(figures: GatewayFigures, lines: Mapping[str, Turns], in_flight: int) -> Iterator[Metric]:
    """What a scrape tells.

    Args:
        figures: what happened.
        lines: of all models that were asked for.
        in_flight: requests that have not ended.
    """
    models = figures.models
    yield gauge("lllm3090_gateway_in_flight", "Requests that have not ended.", (), [((), in_flight)])
    in_work = {(name,): line.in_work for name, line in lines.items()}
    yield gauge("lllm3090_gateway_in_work", "Requests that hold a slot.", MODEL, in_work.items())
    waiting = {(name,): line.waiting for name, line in lines.items()}
    yield gauge("lllm3090_gateway_waiting", "Requests that wait for a slot.", MODEL, waiting.items())
    outcomes = {
        (name, outcome): each.outcomes[outcome]
        for name, each in models.items()
        for outcome in Outcome
        if outcome in each.outcomes
    }
    yield counter(
        "lllm3090_gateway_requests", "Requests that have ended.", ("model", "outcome"), outcomes.items()
    )
    refusals = {(code,): count for code, count in figures.refusals.items()}
    yield counter("lllm3090_gateway_refusals", "Refused requests by code.", ("code",), refusals.items())
    for word, text, tokens in (
        ("prompt", "Tokens of prompts.", {(name,): each.prompt_tokens for name, each in models.items()}),
        (
            "generated",
            "Generated tokens.",
            {(name,): each.generated_tokens for name, each in models.items()},
        ),
    ):
        yield counter(f"lllm3090_gateway_{word}_tokens", text, MODEL, tokens.items())
    for word, text, rows in (
        (
            "first_byte",
            "To the first byte of an answer.",
            {n: each.first_byte for n, each in models.items()},
        ),
        ("request", "To the end of an answer.", {n: each.total for n, each in models.items()}),
        ("load_wait", "Waited for a model to be loaded.", {n: each.load_wait for n, each in models.items()}),
        ("line_wait", "Waited for a slot.", {n: each.line_wait for n, each in models.items()}),
    ):
        counted = {(name,): each for name, each in rows.items() if each.count}
        yield histogram(f"lllm3090_gateway_{word}_seconds", text, MODEL, counted.items())
