"""What is on disk: GGUF headers, the facts planning needs, and names."""
