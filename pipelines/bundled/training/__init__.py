"""Trains the bundled model from nothing; never imported by the server."""
