"""Pure arithmetic: what a launch costs and the largest launch that fits. No I/O in here."""
