"""The Gluon kernel as code for Hopper, on machines that have none."""
