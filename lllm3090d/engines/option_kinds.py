"""Options of ``llama-server`` that a person may give without a price, and those that the daemon decides. Data.

One spelling stands for all of an option. Held against the options of every captured ``--help``.
"""

from __future__ import annotations

from collections.abc import Mapping

# Spellings -> why nobody else may give them.
OWNED: Mapping[tuple[str, ...], str] = {
    (
        "--model", "--model-url", "--docker-repo", "--hf-repo", "--hf-file", "--hf-repo-v", "--hf-file-v", "--hf-token",
        "--model-vocoder", "--models-dir", "--models-preset", "--models-max", "--models-autoload",
        "--embd-gemma-default", "--fim-qwen-1.5b-default", "--fim-qwen-3b-default", "--fim-qwen-7b-default",
        "--fim-qwen-7b-spec", "--fim-qwen-14b-spec", "--fim-qwen-30b-default", "--gpt-oss-20b-default",
        "--gpt-oss-120b-default", "--vision-gemma-4b-default", "--vision-gemma-12b-default",
    ): "the daemon decides which files an engine loads",
    ("--mmproj", "--mmproj-url", "--spec-draft-model", "--model-draft", "--spec-draft-hf"): (
        "projectors and drafters are found beside their model; whether they are used is asked of the daemon"
    ),
    ("--host", "--port", "--reuse-port", "--api-prefix", "--ssl-key-file", "--ssl-cert-file"): (
        "the daemon reaches its engines on a socket of its own"
    ),
    ("--api-key", "--api-key-file"): "with a key the daemon would be locked out of its own engine",
    ("--alias",): "clients find the model under the name that the daemon gives it",
    ("--fit", "--fit-target", "--fit-ctx"): "the plan is what was priced, so the engine must not change it",
    (
        "--device", "--list-devices", "--split-mode", "--tensor-split", "--main-gpu", "--spec-draft-device",
        "--mmproj-device",
    ): "the daemon decides which cards a model is on, and what of it is on each; --gpu names the only one it may be on",
    ("--metrics", "--slots", "--no-slots"): "the daemon watches its engines by it, so it is always on",
    ("--log-disable", "--log-jsonl"): "the daemon reads the engine's log",
    ("--sleep-idle-seconds",): "the daemon decides when a model leaves memory",
    ("--help", "--version", "--cache-list", "--completion-bash"): "with it the engine serves nothing",
    ("--spec-draft-type-k", "--cache-type-k-draft", "--spec-draft-type-v", "--cache-type-v-draft"): (
        "the planner gives the draft's cache the cheaper of the main type and f16"
    ),
    ("--spec-draft-ngl", "--n-gpu-layers-draft"): "a draft is where its model is",
    ("--spec-draft-window", "--spec-draft-n-max-tail", "--kv-vram-cells"): (
        "the planner decides where a tiered cache is divided; ask for a tier instead"
    ),
    ("--kv-unified-per-slot",): "the window of a slot follows from the context and the number of slots",
    ("--rope-scale", "--rope-freq-scale", "--yarn-orig-ctx"): (
        "how far positions are stretched follows from the context"
    ),
}  # fmt: skip

# Processor, log, sampling, templates, HTTP: nothing that the ledger would show.
FREE: tuple[str, ...] = (
    "--threads", "--threads-batch", "--cpu-mask", "--cpu-range", "--cpu-strict", "--prio", "--poll",
    "--cpu-mask-batch", "--cpu-range-batch", "--cpu-strict-batch", "--prio-batch", "--poll-batch", "--numa",
    "--predict", "--keep", "--perf", "--escape", "--rope-freq-base", "--yarn-ext-factor", "--yarn-attn-factor",
    "--yarn-beta-slow", "--yarn-beta-fast", "--defrag-thold", "--mmap", "--direct-io", "--load-mode",
    "--lazy-mode", "--repack", "--op-offload", "--check-tensors", "--control-vector-layer-range",
    "--lora-init-without-apply", "--offline", "--log-file", "--log-colors", "--verbose", "--verbosity",
    "--log-prefix", "--log-timestamps", "--log-prompts-dir", "--samplers", "--seed", "--sampler-seq",
    "--ignore-eos", "--temp", "--top-k", "--top-p", "--min-p", "--top-nsigma", "--xtc-probability",
    "--xtc-threshold", "--typical", "--repeat-last-n", "--repeat-penalty", "--presence-penalty",
    "--frequency-penalty", "--dry-multiplier", "--dry-base", "--dry-allowed-length", "--dry-penalty-last-n",
    "--dry-sequence-breaker", "--adaptive-target", "--adaptive-decay", "--dynatemp-range", "--dynatemp-exp",
    "--mirostat", "--mirostat-lr", "--mirostat-ent", "--logit-bias", "--grammar", "--grammar-file",
    "--json-schema", "--json-schema-file", "--spec-draft-threads", "--spec-draft-threads-batch",
    "--spec-draft-cpu-mask", "--spec-draft-cpu-range", "--spec-draft-cpu-strict", "--spec-draft-prio",
    "--spec-draft-poll", "--spec-draft-cpu-mask-batch",
    "--spec-draft-cpu-strict-batch", "--spec-draft-prio-batch", "--spec-draft-poll-batch", "--spec-draft-n-min",
    "--spec-draft-p-split", "--spec-draft-p-min", "--spec-draft-sampling", "--spec-draft-backend-sampling",
    "--spec-synth-len", "--spec-synth-rates", "--spec-ngram-mod-n-min", "--spec-ngram-mod-n-max",
    "--spec-ngram-mod-n-match", "--spec-ngram-simple-size-n", "--spec-ngram-simple-size-m",
    "--spec-ngram-simple-min-hits", "--spec-ngram-map-k-size-n", "--spec-ngram-map-k-size-m",
    "--spec-ngram-map-k-min-hits", "--spec-ngram-map-k4v-size-n", "--spec-ngram-map-k4v-size-m",
    "--spec-ngram-map-k4v-min-hits", "--lookup-cache-static", "--lookup-cache-dynamic", "--cache-idle-slots",
    "--context-shift", "--reverse-prompt", "--special", "--warmup", "--spm-infill", "--cont-batching", "--tags",
    "--embd-normalize", "--path", "--cors-origins", "--cors-methods", "--cors-headers", "--cors-credentials",
    "--ui-config", "--ui-config-file", "--ui-mcp-proxy", "--tools", "--tools-runtime", "--mcp-servers-config",
    "--mcp-servers-json", "--agent", "--ui", "--chat-template-kwargs", "--timeout", "--sse-ping-interval",
    "--threads-http", "--cache-prompt", "--cache-reuse", "--props", "--slot-save-path", "--media-path",
    "--jinja", "--reasoning-format", "--reasoning", "--reasoning-effort", "--reasoning-budget",
    "--reasoning-budget-message", "--reasoning-preserve",
    "--reasoning-effort-allow", "--reasoning-effort-fallback", "--reasoning-max-tokens-floor",
    "--chat-template", "--chat-template-file",
    "--skip-chat-parsing", "--prefill-assistant", "--slot-prompt-similarity", "--tts-use-guide-tokens",
    "--video-fps", "--video-timestamp-interval", "--video-ffmpeg-dir",
)  # fmt: skip
