"""A real ``systemd --user`` with its own session bus and journal, where a machine or a test has none.

Standard library only: it runs before any virtual environment exists.
"""
