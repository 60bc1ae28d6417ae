"""Block top-k attention: a box of queries sees its neighbours and the boxes that it scores highest."""
