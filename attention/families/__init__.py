"""The Diffusers transformers that can be swapped: a row for each class, and what rows are made of."""

from attention.families.table import FAMILIES, family_of, self_attention_modules

__all__ = ["FAMILIES", "family_of", "self_attention_modules"]
