"""The real server against clients that mean it no good."""
