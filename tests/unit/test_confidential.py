"""Variables whose names say that they are secrets reach no engine; nothing that an engine needs is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from lllm3090d.engines.capabilities import Build
from lllm3090d.engines.confidential import confidential
from lllm3090d.engines.process import FIXED_ENVIRONMENT, clean_environment

pytestmark = pytest.mark.unit

SECRETS = [
    "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN", "GITHUB_TOKEN", "GH_TOKEN", "NPM_TOKEN", "DB_PASSWORD",
    "PGPASSWORD_FILE_PASSWORD", "VAULT_TOKEN",
    "MY_APIKEY", "SSH_PASSPHRASE", "CLIENT_SECRET", "SECRET", "TOKEN", "PASSWORD", "api_key", "DB_PASSWORD2",
    "GOOGLE_APPLICATION_CREDENTIALS", "SESSION_COOKIE",
]  # fmt: skip
NEEDED = [
    "PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME", "DBUS_SESSION_BUS_ADDRESS",
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_CACHE_PATH", "CUDA_MODULE_LOADING", "GGML_CUDA_P2P",
    "GGML_VK_VISIBLE_DEVICES", "GGML_CUDA_ENABLE_UNIFIED_MEMORY", "NVIDIA_VISIBLE_DEVICES", "VK_DRIVER_FILES",
    "VK_ICD_FILENAMES", "MESA_VK_DEVICE_SELECT", "HSA_OVERRIDE_GFX_VERSION", "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
    "OMP_NUM_THREADS", "MALLOC_ARENA_MAX", "KEYBOARD", "TOKENIZERS_PARALLELISM", "SSH_ASKPASS", "PWD",
    "OLDPWD", "MONKEY",
]  # fmt: skip


def test_secrets_are_told_by_their_names_and_nothing_else_is_one() -> None:
    assert confidential([*SECRETS, *NEEDED]) == set(SECRETS)


def test_a_program_that_is_asked_gets_none_of_them(tmp_path: Path) -> None:
    build = Build(tmp_path / "llama-server", (tmp_path,), "test", locked=False)
    environment = clean_environment(build, dict.fromkeys([*SECRETS, *NEEDED], "x"))
    assert set(environment) & set(SECRETS) == set()
    assert set(NEEDED) - {"LD_LIBRARY_PATH"} <= set(environment) | set(FIXED_ENVIRONMENT)
