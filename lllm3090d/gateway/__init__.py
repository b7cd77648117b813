"""The OpenAI/Anthropic-compatible address: one port for every model, each loaded when it is asked for."""
