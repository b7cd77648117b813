"""What keeps the manual true: its commands, and its pictures."""
