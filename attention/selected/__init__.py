"""Attention over selected rows of one shared key/value head, and the compressed attention built on it."""
