"""The daemon that owns the graphics card. Start it with ``python -m lllm3090d``."""
