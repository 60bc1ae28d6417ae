"""Typed settings, model presets and the contracts that cross process borders.

Knows: what a job, a model and an attention setting are, and which values are valid.
Does not know: tensors, queues, HTTP. Importing it never imports torch.
"""
