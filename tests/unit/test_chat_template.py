"""Words about reasoning in chat templates."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lllm3090d.checkpoints.chat_template import MAX_LEVELS, SWITCHES, reasoning_words
from lllm3090d.checkpoints.facts import read_facts
from tests.fakes.gguf_files import write_llama

pytestmark = pytest.mark.unit

EFFORT = "reasoning_effort"


def levels(*words: str) -> tuple[str, ...]:
    return (EFFORT, *(f"{EFFORT}={word}" for word in words))


# Written for this test after the manner of published families.
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("", ()),
        ("{{ messages }}", ()),
        (
            "{%- if enable_thinking is defined and enable_thinking is false %}x{% endif %}",
            ("enable_thinking",),
        ),
        ("{% if not thinking is defined %}{% set thinking = false %}{% endif %}", ("thinking",)),
        ("{%- set thinking = thinking | default(true) -%}", ("thinking",)),
        (
            "{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}{%- endif %}"
            '{{- "Reasoning: " + reasoning_effort }}',
            levels("medium"),
        ),
        (
            "{%- set chosen = reasoning_effort|default('xhigh') %}"
            "{%- if chosen not in ('xhigh', 'medium', 'low') %}{{ raise_exception('bad effort') }}{% endif %}",
            levels("xhigh", "medium", "low"),
        ),
        (
            '{% if reasoning_effort == "low" or "high" == reasoning_effort %}{% endif %}',
            levels("low", "high"),
        ),
        ("{% if reasoning_effort|lower != 'none' %}{% endif %}", levels("none")),
        ("{% if reasoning_effort.lower() == 'none' %}{% endif %}", levels("none")),
        ("{% if reasoning_effort in {'low': 1, 'max': 'no'} %}{% endif %}", levels("low", "max")),
        (
            "{% set known = ['low', 'high'] %}{% if reasoning_effort in known %}{% endif %}",
            levels("low", "high"),
        ),
        ("{% set e = reasoning_effort or 'low' %}{% if e == 'high' %}{% endif %}", levels("low", "high")),
        (
            "{{ {'a': {'b': 1}} }}{% if thinking_mode == 'on' %}{% endif %}",
            ("thinking_mode", "thinking_mode=on"),
        ),
        (
            "{%- macro turn(m) -%}{%- if thinking -%}{{ m.reasoning }}{%- endif -%}{%- endmacro -%}"
            "{%- if thinking is undefined -%}{%- set thinking = true -%}{%- endif -%}"
            "{%- if thinking_effort is undefined -%}{%- set thinking_effort = 'max' -%}{%- endif -%}"
            "{%- if thinking and thinking_effort not in ['low', 'max'] -%}{%- endif -%}",
            ("thinking", "thinking_effort", "thinking_effort=max", "thinking_effort=low"),
        ),
        (
            "{%- set ns = namespace(enable_thinking=true) -%}{%- if '/think' in content -%}"
            "{%- set ns.enable_thinking = true -%}{%- endif -%}{{ content.replace('/no_think', '') }}"
            "{%- if ns.enable_thinking is false -%}{{ '<think></think>' }}{%- endif -%}",
            ("/think", "/no_think"),
        ),
        (
            "{%- if not thinking_budget is defined %}{%- set thinking_budget = -1 -%}{%- endif -%}"
            '{%- if thinking_budget == 0 %}{{ \'{{"a": "}}\' }}{%- endif %}{{ preserve_thinking }}',
            ("thinking_budget", "preserve_thinking"),
        ),
        ('{% if "/no_think" in system %}{% elif "/think" in system %}{% endif %}', ("/think", "/no_think")),
        (
            "{{ '/nothink' if enable_thinking is defined and not text.endswith('/nothink') else '' }}",
            ("enable_thinking", "/nothink"),
        ),
    ],
)
def test_words_that_stand_there(template: str, expected: tuple[str, ...]) -> None:
    assert reasoning_words(template) == expected


@pytest.mark.parametrize(
    "template",
    [
        "enable_thinking reasoning_effort == 'low' /think",  # text of the prompt
        "{# enable_thinking is false #}",
        "{{ 'enable_thinking' }}",
        "{{ message.thinking }}{{ message['thinking'] }}",
        "{{ message | thinking }}",
        "{% set thinking = message.content %}{{ thinking }}",
        "{% for thinking in thoughts %}{{ thinking }}{% endfor %}",
        "{% macro show(thinking, reasoning_effort='low') %}{{ thinking }}{% endmacro %}",
        "{{ namespace(thinking=true) }}",
        "{{ '</think>' }}{% set x = content.split('</think>') %}",
        "{{ '/no_think' }}",  # written, not looked for
        "{{ 'an unterminated text }}{% if enable_thinking %}",
        "{# an unterminated comment {% if enable_thinking %}",
        "{% if my_enable_thinking %}{% endif %}",
    ],
)
def test_words_that_only_seem_to_stand_there(template: str) -> None:
    assert reasoning_words(template) == ()


@pytest.mark.parametrize(
    "template",
    [
        "{{ reasoning_effort }}{% if other == 'low' %}{% endif %}",
        "{{ reasoning_effort == low }}",
        "{{ reasoning_effort in [low, high] }}{{ reasoning_effort in }}{{ reasoning_effort in names }}",
        "{% set text = 'as ' + reasoning_effort %}{% if text == 'low' %}{% endif %}{% set text = 'high' %}",
        "{% if reasoning_effort == 'no word at all' %}{% endif %}",
        "{{ reasoning_effort | default(x) }}{{ reasoning_effort | replace('low', 'high') }}",
        "{% if reasoning_effort == '' %}{% endif %}{{ reasoning_effort",
    ],
)
def test_levels_are_not_made_up(template: str) -> None:
    assert reasoning_words(template) == (EFFORT,)


def test_levels_are_bounded() -> None:
    many = ", ".join(f"'a{number}'" for number in range(1000))
    assert len(reasoning_words(f"{{{{ reasoning_effort in [{many}] }}}}")) == 1 + MAX_LEVELS


@pytest.mark.parametrize(
    "piece",
    [
        "'",
        '"',
        "\\'",
        '"\\',
        "{{",
        "{#",
        "{%",
        "{{'",
        "{{ thinking ",
        "{{ thinking|d(",
        "thinking|d(1)",
        *("{{ thinking|d(" + "," * commas for commas in range(1, 6)),
        "(",
        "thinking in [",
        "}",
    ],
)
@pytest.mark.timeout(300)  # a quadratic search would take longer by far
def test_hostile_templates_come_to_an_end(piece: str) -> None:
    """A quarter of a megabyte of the same sign takes about a second; a quadratic search runs into the time limit."""
    template = "{{ reasoning_effort " + piece * (250_000 // len(piece))
    assert set(reasoning_words(template)) <= {"reasoning_effort", "thinking"}


@given(
    st.lists(
        st.sampled_from(
            [
                *SWITCHES,
                *"{}[]().=:,x|",
                "{{",
                "}}",
                "{%",
                "%}",
                "{#",
                "#}",
                "'",
                '"',
                "\\",
                " in ",
                "==",
                "'low'",
                "|default(",
                " set ",
                " for ",
                " macro ",
                " or ",
                " not",
            ]
        ),
        max_size=60,
    )
)
def test_any_template_is_read(pieces: list[str]) -> None:
    """Nothing raises, and what is found stands in the template."""
    template = "".join(pieces)
    for word in reasoning_words(template):
        assert all(part in template for part in word.split("="))


def test_facts_have_the_words(tmp_path: Path) -> None:
    template = "{% if reasoning_effort == 'low' %}{% endif %}"
    path = tmp_path / "m.gguf"
    write_llama(path, metadata={"tokenizer.chat_template": template})
    assert read_facts([path]).reasoning == levels("low")
    for absent in (None, "", "{{ messages }}"):
        write_llama(path, metadata={"tokenizer.chat_template": absent})
        assert read_facts([path]).reasoning == ()
    # A text too long to be kept is a template, but nobody reads it.
    write_llama(path, metadata={"tokenizer.chat_template": template + "x" * (1 << 18)})
    assert read_facts([path]).has_chat_template
    assert read_facts([path]).reasoning == ()
