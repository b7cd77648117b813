"""llama-server builds: finding them, asking what they can do, writing their command line."""
