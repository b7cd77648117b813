"""The cards: readings of their memory, without ever opening a compute context."""
