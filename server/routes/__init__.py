"""One file per resource; each holds a router and nothing that another file needs."""
