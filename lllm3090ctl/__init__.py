"""The thin client of the daemon's Unix socket. Imports nothing of the daemon."""
