"""Self-attention of one clip on several ranks: tokens are shared out, and what it needs is exchanged."""
