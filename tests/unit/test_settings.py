"""Settings: precedence, every kind of bad value, and the reference pages that must say the same as the code."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from lllm3090d.engines.tier_flags import ReasoningRules
from lllm3090d.errors import ErrorCode, ExitStatus, LlmError
from lllm3090d.setting_table import allowed, unit
from lllm3090d.settings import (
    ENVIRONMENT_PREFIX,
    EXAMPLES_OF_TABLES,
    FOREIGN_VARIABLES,
    SETTING_KEYS,
    CardChoice,
    Desktop,
    LogLevel,
    Settings,
    default_config_file,
    load_settings,
    setting_kind,
)

pytestmark = pytest.mark.unit

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
HOME = "/home/somebody"
RUNTIME = "/run/user/1000"
PATH_KEYS = ("models_dir", "state_dir", "runtime_dir", "llama_dir", "engines_dir", "catalogue_file")
UNITS = {"MiB", "tokens", "seconds", "days"}


@pytest.fixture(autouse=True)
def somebodys_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the machine that runs the tests reaches them."""
    for variable in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_DATA_HOME", "LLLM3090_CONFIG"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", HOME)
    monkeypatch.setenv("XDG_RUNTIME_DIR", RUNTIME)


def load(tmp_path: Path, text: str = "", environment: Mapping[str, str] | None = None) -> Settings:
    """Settings from a file with this text and from these variables only."""
    file = tmp_path / "config.toml"
    file.write_text(text, encoding="utf-8")
    return load_settings(file, environment or {})


def refusal(tmp_path: Path, text: str = "", environment: Mapping[str, str] | None = None) -> LlmError:
    with pytest.raises(LlmError) as caught:
        load(tmp_path, text, environment)
    assert caught.value.code is ErrorCode.SETTINGS_INVALID
    assert caught.value.kind.exit_status is ExitStatus.CONFIG
    assert caught.value.hint
    json.dumps(caught.value.problem())
    return caught.value


# --- where values come from --------------------------------------------------------------------------------


def test_environment_outranks_file_outranks_default(tmp_path: Path) -> None:
    text = "batch_tokens = 1024\nmicro_batch_tokens = 256\n"
    settings = load(tmp_path, text, {"LLLM3090_BATCH_TOKENS": "4096"})
    assert settings.batch_tokens == 4096
    assert settings.micro_batch_tokens == 256
    assert settings.context_checkpoints == 8
    assert settings.checkpoint_min_step_tokens == 8192


def test_without_file_and_variables_every_default_holds(tmp_path: Path) -> None:
    settings = load_settings(tmp_path / "missing.toml", {})
    assert settings.models_dir == Path(HOME, "models")
    assert settings.state_dir == Path(HOME, ".local/state/lllm3090")
    assert settings.runtime_dir == Path(RUNTIME, "lllm3090d")
    assert settings.llama_dir == Path(HOME, ".local/share/lllm3090/llama.cpp")
    assert settings.engines_dir == Path(HOME, ".local/share/lllm3090/engines")
    assert (settings.card, settings.desktop) == (CardChoice.AUTO, Desktop.AUTO)
    assert (settings.driver_reserve_mib, settings.desktop_reserve_mib, settings.workspace_reserve_mib) == (
        512,
        2400,
        1024,
    )
    assert settings.log_level is LogLevel.INFO
    assert settings.stop_models_on_exit is False


def test_sockets_lie_in_the_runtime_directory(tmp_path: Path) -> None:
    settings = load(tmp_path, 'runtime_dir = "/tmp/elsewhere"')
    assert settings.control_socket == Path("/tmp/elsewhere/control.sock")  # noqa: S108  # a name, not a file
    assert settings.engine_sockets_dir == Path("/tmp/elsewhere/engines")  # noqa: S108  # a name, not a file


@pytest.mark.parametrize(
    ("variable", "key", "below"),
    [
        ("XDG_STATE_HOME", "state_dir", "lllm3090"),
        ("XDG_DATA_HOME", "llama_dir", "lllm3090/llama.cpp"),
        ("XDG_DATA_HOME", "engines_dir", "lllm3090/engines"),
        ("XDG_CONFIG_HOME", "catalogue_file", "lllm3090/catalogue.json"),
        ("XDG_RUNTIME_DIR", "runtime_dir", "lllm3090d"),
    ],
)
def test_xdg_directories_are_respected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, key: str, below: str
) -> None:
    monkeypatch.setenv(variable, "/somewhere")
    assert getattr(load(tmp_path), key) == Path("/somewhere", below)


def test_relative_and_empty_xdg_directories_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("XDG_DATA_HOME", "")
    settings = load(tmp_path)
    assert settings.state_dir == Path(HOME, ".local/state/lllm3090")
    assert settings.engines_dir == Path(HOME, ".local/share/lllm3090/engines")


def test_config_file_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_config_file() == Path(HOME, ".config/lllm3090/config.toml")
    monkeypatch.setenv("XDG_CONFIG_HOME", "/etc/xdg")
    assert default_config_file() == Path("/etc/xdg/lllm3090/config.toml")
    monkeypatch.setenv("LLLM3090_CONFIG", "~/other.toml")
    assert default_config_file() == Path(HOME, "other.toml")


def test_the_default_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "lllm3090").mkdir()
    (tmp_path / "lllm3090" / "config.toml").write_text("batch_tokens = 64")
    assert load_settings(environment={}).batch_tokens == 64


def test_the_processs_own_environment_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLLM3090_BATCH_TOKENS", "64")
    assert load_settings(tmp_path / "missing.toml").batch_tokens == 64


def test_a_blanked_variable_is_unset(tmp_path: Path) -> None:
    environment = {"LLLM3090_BATCH_TOKENS": "", "LLLM3090_ALIASES": "", "LLLM3090_LLAMA_DIR": ""}
    settings = load(tmp_path, "batch_tokens = 1024", environment)
    assert settings.batch_tokens == 1024
    assert settings.aliases == {}
    assert not settings.llama_dir_from_env


def test_llama_dir_is_locked_by_the_environment_only(tmp_path: Path) -> None:
    text = 'llama_dir = "/opt/llama"'
    assert not load(tmp_path).llama_dir_from_env
    assert not load(tmp_path, text).llama_dir_from_env
    settings = load(tmp_path, text, {"LLLM3090_LLAMA_DIR": "/opt/other"})
    assert settings.llama_dir_from_env
    assert settings.llama_dir == Path("/opt/other")


def test_variables_of_other_programs_are_no_settings(tmp_path: Path) -> None:
    environment = dict.fromkeys(FOREIGN_VARIABLES, "x") | {"LLLM3091_BATCH_TOKENS": "1", "PATH": "/bin"}
    assert load(tmp_path, environment=environment) == load(tmp_path)


def test_aliases_come_from_both_places(tmp_path: Path) -> None:
    assert load(tmp_path, '[aliases]\nqwen = "Qwen3.8-27B"').aliases == {"qwen": "Qwen3.8-27B"}
    environment = {"LLLM3090_ALIASES": '{"g": "gemma"}'}
    assert load(tmp_path, 'aliases = { qwen = "Q" }', environment).aliases == {"g": "gemma"}


def test_further_arguments_come_from_both_places(tmp_path: Path) -> None:
    text = '[extra_arguments]\n"*" = ["--threads", "8"]\nqwen = ["-np", "1"]'
    assert load(tmp_path, text).extra_arguments == {"*": ("--threads", "8"), "qwen": ("-np", "1")}
    environment = {"LLLM3090_EXTRA_ARGUMENTS": '{"g": ["--seed", "1"]}'}
    assert load(tmp_path, text, environment).extra_arguments == {"g": ("--seed", "1")}


@pytest.mark.parametrize("key", PATH_KEYS)
def test_tilde_is_expanded(tmp_path: Path, key: str) -> None:
    assert getattr(load(tmp_path, f'{key} = "~/here"'), key) == Path(HOME, "here")
    assert getattr(load(tmp_path, environment={f"LLLM3090_{key.upper()}": "~/there"}), key) == Path(
        HOME, "there"
    )


def test_settings_are_frozen(tmp_path: Path) -> None:
    settings = load(tmp_path)
    with pytest.raises(ValueError, match="frozen"):
        settings.batch_tokens = 1


# --- what is refused ---------------------------------------------------------------------------------------

BAD_VALUES = [
    ("models_dir", '"relative/path"', "absolute"),
    ("state_dir", "7", "path"),
    ("runtime_dir", '"~nosuchuser-xyz/run"', "~nosuchuser-xyz has no home directory"),
    ("llama_dir", "true", "true and false"),
    ("engines_dir", "[]", "path"),
    ("catalogue_file", '"catalogue.json"', "absolute"),
    ("aliases", '"qwen"', "valid dictionary"),
    ("aliases", "{ qwen = 3 }", "valid string"),
    ("extra_arguments", '["--threads", "8"]', "valid dictionary"),
    ("extra_arguments", '{ qwen = "--threads 8" }', "valid tuple"),
    ("autoload", '["qwen"]', 'one text with commas, such as "qwen"'),
    ("autoload_wait_s", "-1", "greater than or equal to 0"),
    ("card", '"gpu"', "'auto', 'nvidia', 'amd', 'intel' or 'cpu'"),
    ("desktop", '"yes"', "'auto', 'active' or 'inactive'"),
    ("driver_reserve_mib", "-1", "greater than or equal to 0"),
    ("driver_reserve_mib", "1.5", "integer"),
    ("driver_reserve_mib", "true", "true and false"),
    ("desktop_reserve_mib", "1073741825", "less than or equal to 1073741824"),
    ("workspace_reserve_mib", '"1 GiB"', "integer"),
    ("cache_type", '"q9_0"', "'q8_0'"),
    ("slot_policy", '"fair"', "'balanced' or 'window'"),
    ("offload", '"maybe"', "'resident' or 'allowed'"),
    ("drafting", '"mtp"', "'auto', 'on' or 'off'"),
    ("draft_tokens", "0", "greater than or equal to 1"),
    ("projector", '"gpu"', "'auto', 'card', 'host' or 'off'"),
    ("image_max_tokens", "-1", "greater than or equal to 0"),
    ("compute_buffer_factor", "0.9", "greater than or equal to 1"),
    ("compute_buffer_factor", "nan", "less than or equal to 4"),
    ("micro_batch_tokens", "31", "greater than or equal to 32"),
    ("micro_batch_tokens", "8193", "less than or equal to 8192"),
    ("batch_tokens", "65537", "less than or equal to 65536"),
    ("context_checkpoints", "257", "less than or equal to 256"),
    ("checkpoint_min_step_tokens", "-1", "greater than or equal to 0"),
    ("prompt_cache_mib", "-5", "greater than or equal to 0"),
    ("reasoning_efforts", "7", "valid string"),
    ("reasoning_efforts", '"low, ,high"', "'' is no word for an effort"),
    ("reasoning_effort_fallback", '"medium"', "not among those allowed"),
    ("reasoning_floor_tokens", "-1", "greater than or equal to 0"),
    ("engine_pin", '""', "at least 1 character"),
    ("load_timeout_s", "0", "greater than 0"),
    ("load_timeout_s", "nan", "less than or equal to 86400"),
    ("load_timeout_s", "inf", "less than or equal to 86400"),
    ("load_cap_s", "-1", "greater than or equal to 0"),
    ("stop_timeout_s", '"soon"', "number"),
    ("drain_s", "-1", "greater than or equal to 0"),
    ("hang_policy", '"kill"', "'restart' or 'report'"),
    ("hang_patience_s", "0", "greater than 0"),
    ("verify_after_load", '"maybe"', "'off', 'peak' or 'probe'"),
    ("release_timeout_s", "-0.5", "greater than 0"),
    ("restart_failed", '"maybe"', "valid boolean"),
    ("restart_pause_s", "0", "greater than 0"),
    ("restart_pause_s", "301", "less than or equal to 300"),
    ("queue_timeout_s", "0", "greater than 0"),
    ("queue_timeout_s", "86401", "less than or equal to 86400"),
    ("least_residency_s", "-1", "greater than or equal to 0"),
    ("least_idle_s", "nan", "less than or equal to 86400"),
    ("serve_smaller", '"perhaps"', "boolean"),
    ("pressure_policy", '"panic"', "'warn', 'yield' or 'ignore'"),
    ("pressure_grace_s", "0", "greater than 0"),
    ("device_memory_limit", '"perhaps"', "boolean"),
    ("history_days", "0", "greater than or equal to 1"),
    ("history_mib", "1025", "less than or equal to 1024"),
    ("suspend", '"hibernate"', "'auto', 'unload', 'keep' or 'stop'"),
    ("idle_ttl_s", "-1", "greater than or equal to 0"),
    ("idle_ttl_of", '{qwen = "soon"}', "valid number"),
    ("models", '{qwen = "big"}', "valid dictionary or instance"),
    ("gateway", '"perhaps"', "boolean"),
    ("gateway_address", '"localhost"', "IPv4 or IPv6 address"),
    ("gateway_port", "65536", "less than or equal to 65535"),
    ("gateway_hosts", "1", "valid string"),
    ("gateway_origins", '"localhost:3000"', "http://localhost:3000"),
    ("gateway_default_model", "7", "valid string"),
    ("gateway_models", "{qwen = 1}", "valid string"),
    ("gateway_reasoning", '{qwen = "low"}', "valid dictionary or instance"),
    ("gateway_reasoning", '{qwen = {efforts = "low"}}', "one of them must stand in"),
    ("gateway_load", '"maybe"', "'wait', 'retry' or 'refuse'"),
    ("gateway_wait_s", "0", "greater than 0"),
    ("gateway_starvation_s", "-1", "greater than or equal to 0"),
    ("gateway_keepalive_s", "-1", "greater than 0"),
    ("gateway_queue", "-1", "greater than or equal to 0"),
    ("gateway_body_mib", "0", "greater than or equal to 1"),
    ("gateway_access_log", '"perhaps"', "boolean"),
    ("requests_days", "0", "greater than or equal to 1"),
    ("requests_kept", "1000001", "less than or equal to 1000000"),
    ("notifications", '"crashes"', "crashes is none of all, none, or some of refused, failed"),
    ("stop_models_on_exit", '"perhaps"', "boolean"),
    ("log_level", '"INFO"', "'debug', 'info', 'warning' or 'error'"),
]


def test_every_setting_has_a_bad_value_below() -> None:
    assert {key for key, _, _ in BAD_VALUES} == set(SETTING_KEYS)


@pytest.mark.parametrize(("key", "literal", "allowed"), BAD_VALUES)
def test_bad_value_in_the_file_names_file_key_value_and_what_is_allowed(
    tmp_path: Path, key: str, literal: str, allowed: str
) -> None:
    error = refusal(tmp_path, f"{key} = {literal}")
    assert f"{tmp_path / 'config.toml'}: {key}" in error.message
    assert allowed in error.message
    (value,) = tomllib.loads(f"v = {literal}").values()
    shown = value["qwen"] if isinstance(value, dict) else value
    # Flags stand there as in the file; of tables of sections only the section is named.
    as_text = {bool: literal, dict: "qwen"}.get(type(shown), repr(shown))
    assert as_text in error.message


def test_a_list_is_written_as_one_text(tmp_path: Path) -> None:
    said = refusal(tmp_path, 'notifications = ["refused", "failed"]').message
    assert said.endswith('is not valid: it is one text with commas, such as "refused,failed"')
    assert "valid string" in refusal(tmp_path, 'engine_pin = ["b1"]').message  # which is no list of anything
    assert "valid string" in refusal(tmp_path, "autoload = [1]").message


def test_what_is_said_is_not_in_words_of_the_library(tmp_path: Path) -> None:
    said = refusal(tmp_path, 'notifications = true\nmodels_dir = "models"').message
    assert "notifications = true is not valid: true and false are for flags only" in said
    assert "is not valid: must be an absolute path" in said


def test_a_long_bad_value_is_shown_in_part(tmp_path: Path) -> None:
    error = refusal(tmp_path, f'engine_pin = "{"x" * 100_000}"')
    assert "engine_pin = 'xxx" in error.message and len(error.message) < 1000


@pytest.mark.parametrize(
    ("variable", "text", "allowed"),
    [
        ("LLLM3090_MODELS_DIR", "models", "absolute"),
        ("LLLM3090_CARD", "gpu", "'auto', 'nvidia', 'amd', 'intel' or 'cpu'"),
        ("LLLM3090_BATCH_TOKENS", "many", "integer"),
        ("LLLM3090_LOAD_TIMEOUT_S", "-1", "greater than 0"),
        ("LLLM3090_STOP_MODELS_ON_EXIT", "perhaps", "boolean"),
        ("LLLM3090_ALIASES", "[1]", "valid dictionary"),
        ("LLLM3090_ALIASES", "qwen=Qwen", "not a JSON object"),
    ],
)
def test_bad_value_in_the_environment_names_the_variable(
    tmp_path: Path, variable: str, text: str, allowed: str
) -> None:
    error = refusal(tmp_path, "", {variable: text})
    assert f"environment: {variable}" in error.message
    assert allowed in error.message


def test_a_bad_alias_is_named(tmp_path: Path) -> None:
    assert "config.toml: aliases.b = 3" in refusal(tmp_path, 'aliases = { a = "x", b = 3 }').message


def test_a_bad_argument_is_named(tmp_path: Path) -> None:
    message = refusal(tmp_path, 'extra_arguments = { "*" = ["--threads", 8] }').message
    assert "config.toml: extra_arguments.*.1 = 8" in message


def test_rules_for_reasoning_go_together(tmp_path: Path) -> None:
    assert load(tmp_path).reasoning == ReasoningRules()
    lines = (
        'reasoning_efforts = "low, medium,xhigh"',
        'reasoning_effort_fallback = "medium"',
        "reasoning_floor_tokens = 24576",
    )
    text = "\n".join(lines)
    assert load(tmp_path, text).reasoning == ReasoningRules(("low", "medium", "xhigh"), "medium", 24_576)
    alone = refusal(tmp_path, 'reasoning_efforts = "low,medium"')
    assert "reasoning_effort_fallback" in alone.message and "must stand in" in alone.message
    other = refusal(
        tmp_path, 'reasoning_efforts = "low,medium"', {"LLLM3090_REASONING_EFFORT_FALLBACK": "high"}
    )
    assert "high stands in for other efforts and is not among those allowed" in other.message


def test_the_overruled_value_is_not_blamed(tmp_path: Path) -> None:
    text = 'batch_tokens = "nonsense"'
    assert load(tmp_path, text, {"LLLM3090_BATCH_TOKENS": "64"}).batch_tokens == 64


def test_all_bad_values_are_told_at_once(tmp_path: Path) -> None:
    error = refusal(tmp_path, 'card = "gpu"\nbatch_tokens = 1', {"LLLM3090_DESKTOP": "on"})
    problems = error.details["problems"]
    assert len(problems) == 3
    assert {"card", "batch_tokens", "LLLM3090_DESKTOP"} == {
        name for name in ("card", "batch_tokens", "LLLM3090_DESKTOP") if any(name in p for p in problems)
    }


@pytest.mark.parametrize(
    ("text", "key", "meant"),
    [
        ('model_dir = "/m"', "model_dir", "models_dir"),
        ("batch-tokens = 5", "batch-tokens", "batch_tokens"),
        ("[alias]\nq = 'x'", "alias", "aliases"),
        ("llama_dir_from_env = true", "llama_dir_from_env", "llama_dir"),
    ],
)
def test_unknown_key_names_file_and_key_and_guesses(tmp_path: Path, text: str, key: str, meant: str) -> None:
    error = refusal(tmp_path, text)
    assert f"{tmp_path / 'config.toml'}: {key} is not a setting; did you mean {meant}?" in error.message


def test_unknown_key_like_nothing_lists_all_keys(tmp_path: Path) -> None:
    message = refusal(tmp_path, "zzzz = 1").message
    assert all(key in message for key in SETTING_KEYS)


def test_unknown_variable_is_named_and_guessed(tmp_path: Path) -> None:
    message = refusal(tmp_path, "", {"LLLM3090_MODEL_DIR": "/m"}).message
    assert "environment: LLLM3090_MODEL_DIR is not a setting; did you mean LLLM3090_MODELS_DIR?" in message


@pytest.mark.parametrize("content", [b"batch_tokens = ", b"a = 1\na = 2\n", b"\xff\xfe", b"<html></html>"])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "config.toml"
    file.write_bytes(content)
    with pytest.raises(LlmError) as caught:
        load_settings(file, {})
    assert caught.value.code is ErrorCode.SETTINGS_INVALID
    assert str(file) in caught.value.message


@pytest.mark.parametrize("text", ["a = " + "[" * 5000, "load_timeout_s = " + "9" * 5000])
def test_toml_that_the_parser_gives_up_is_named(tmp_path: Path, text: str) -> None:
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(LlmError) as caught:
        load_settings(file, {})
    assert caught.value.code is ErrorCode.SETTINGS_INVALID
    assert str(file) in caught.value.message


def test_a_pipe_in_place_of_the_file_is_not_waited_for(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    os.mkfifo(file)
    with pytest.raises(LlmError, match="no regular file"):
        load_settings(file, {})


def test_a_directory_in_place_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(LlmError, match=re.escape(str(tmp_path))) as caught:
        load_settings(tmp_path, {})
    assert caught.value.code is ErrorCode.SETTINGS_INVALID


# --- the reference -----------------------------------------------------------------------------------------


def unit_or_type(key: str) -> str:
    return unit(key) or setting_kind(key)


def default_text(settings: Settings, key: str) -> str:
    value = getattr(settings, key)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    if key in EXAMPLES_OF_TABLES:
        return "{}"
    return str(value).replace(HOME, "~").replace(RUNTIME, "$XDG_RUNTIME_DIR") or '""'


def test_the_reference_describes_every_setting_as_it_is(tmp_path: Path) -> None:
    settings = load(tmp_path)
    expected = []
    for key in SETTING_KEYS:
        cells = [
            f"`{key}`",
            f"`{ENVIRONMENT_PREFIX}{key.upper()}`",
            unit_or_type(key).replace("|", "\\|"),
            allowed(key),
            f"`{default_text(settings, key)}`",
            str(Settings.model_fields[key].description),
        ]
        expected.append("| " + " | ".join(cells) + " |")
    page = (REFERENCE / "settings.md").read_text().split("\n## All settings\n")[1].split("\n## ")[0]
    written = [" ".join(line.split()) for line in page.splitlines() if line.startswith("| `")]
    assert written == [" ".join(line.split()) for line in expected]


def test_units_of_the_reference_are_told_by_the_names() -> None:
    numbers = [key for key in SETTING_KEYS if setting_kind(key) in {"whole number", "number"}]
    without = [key for key in numbers if unit_or_type(key) not in UNITS]
    assert without == [
        "compute_buffer_factor",
        "context_checkpoints",
        "gateway_port",
        "gateway_queue",
        "requests_kept",
    ]


def test_the_example_file_is_valid_as_it_is(tmp_path: Path) -> None:
    assert load_settings(REFERENCE / "config.example.toml", {}) == load(tmp_path)


def test_the_example_file_shows_every_key_with_its_default(tmp_path: Path) -> None:
    example = (REFERENCE / "config.example.toml").read_text()
    active = re.sub(r"^# (?=\w+ = )", "", example, flags=re.MULTILINE)
    assert tuple(tomllib.loads(active)) == SETTING_KEYS
    shown, default = load(tmp_path, active), load(tmp_path)
    shown_only = [key for key in SETTING_KEYS if getattr(shown, key) != getattr(default, key)]
    assert shown_only == list(EXAMPLES_OF_TABLES)
