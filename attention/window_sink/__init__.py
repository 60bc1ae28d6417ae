"""Sliding-window attention over packed sequences, with per-head sinks in either published meaning."""
