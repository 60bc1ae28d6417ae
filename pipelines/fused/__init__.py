"""The work between matrix products of a transformer block, each row read once.

``norms`` and ``rotary`` are operators on rows, ``projection`` a product of normed rows, ``wan`` puts them
into Diffusers' Wan blocks. On a GPU they are Triton kernels (``kernels``), elsewhere plain PyTorch.
"""
