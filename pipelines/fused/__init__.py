"""The work between matrix products of a transformer block, and between convolutions of a video decoder, each
row read once.

``norms`` and ``rotary`` are operators on rows, ``projection`` a product of normed rows, ``wan`` puts them
into Diffusers' Wan blocks; ``vae_norm`` are operators on pictures, ``wan_vae`` puts them into its decoder.
On a GPU they are Triton kernels (``kernels``, ``vae_kernels``), elsewhere plain PyTorch.
"""
