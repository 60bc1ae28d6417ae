"""Anchor + local attention: tokens see their own block and the anchors; anchors see and are seen by all."""
