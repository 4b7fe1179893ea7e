"""Measurements of speed and memory, as tables and JSON lines. Not in the installed package."""
