"""Telling a client's own server that its job has ended: where to, signed how, and when to try again."""
