"""A run of chaos: faults of every kind while models are used, and a checker that trusts nobody."""
