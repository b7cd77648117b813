"""D-Bus, and nothing else touches it: the only package that imports pydbus or gi."""
