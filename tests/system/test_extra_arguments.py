"""Further arguments through the whole daemon to a real llama-server: by the client, the settings, and refused."""

from __future__ import annotations

import json

import pytest

from tests.system.harness import Service, http_request, model_units

pytestmark = pytest.mark.system
NAME = "SmolLM2-135M-Instruct"


def test_they_change_the_plan_and_reach_the_engine(service: Service) -> None:
    """One with a price, one without, and a value that only the environment can carry past systemd."""
    template = (
        "{% set x = '$HOME; $$' %}{{ x }}{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    service.ctl(
        *("load", "smollm2", "--parallel", "2", "--"),
        *("-c", "2048", "-ctk", "f16", "--temp", "0.25", "--chat-template", template),
    )
    instance = service.instances()[NAME]
    assert (instance["context_tokens"], instance["parallel"]) == (2048, 2)
    assert instance["cache_type_k"] == "f16"
    props = json.loads(http_request(instance["endpoint"], "GET", "/props").body)
    assert props["default_generation_settings"]["params"]["temperature"] == pytest.approx(0.25)
    assert props["chat_template"] == template
    again = service.ctl("load", "smollm2", "--", "--temp", "0.5", check=False)
    assert again.returncode == 5
    assert "runs without `--temp 0.5`" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--host", "0.0.0.0"), "a socket of its own"),  # noqa: S104  # that it is refused
        (("--lora", "/x.gguf"), "no price"),
        (("--no-such",), "has no option"),
        (("-ctk", "q9"), "not among the values"),
        (("-c",), "lacks its value"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    service: Service, arguments: tuple[str, ...], words: str
) -> None:
    for command in ("plan", "load"):
        done = service.ctl(command, "smollm2", "--", *arguments, check=False)
        assert done.returncode == 2
        assert words in done.stderr
    assert model_units() == {}


def test_the_same_load_again_is_satisfied(service: Service) -> None:
    """Though a part of it has no effect on this model, which cannot draft and has no projector."""
    line = ("load", "smollm2", "--context", "2000", "--draft-tokens", "5", "--", "--image-max-tokens", "7")
    service.ctl(*line)
    run = service.instances()[NAME]["run"]
    service.ctl(*line)
    assert service.instances()[NAME]["run"] == run
    service.stop()
    service.start()  # what was asked for is in the unit
    service.ctl(*line)
    assert service.instances()[NAME]["run"] == run
    other = service.ctl("load", "smollm2", "--context", "3000", check=False)
    assert other.returncode == 5
