"""One command for each claim in the README: prints a table and writes JSON."""
