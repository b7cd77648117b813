"""What runs: reservations, decisions, units, readiness, adoption."""
