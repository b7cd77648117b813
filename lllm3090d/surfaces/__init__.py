"""How the world talks to the daemon."""
