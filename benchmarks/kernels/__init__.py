"""Kernels that might replace shipped ones: here until a GPU has said so."""
