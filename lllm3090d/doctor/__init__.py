"""Is this machine fit for the daemon: one line for each thing that matters, with what to do."""
