"""Block top-k attention: every box of queries keeps its neighbours and the boxes of keys that it scores highest."""
