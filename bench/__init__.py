"""Measurements, each runnable alone; they print a table."""
