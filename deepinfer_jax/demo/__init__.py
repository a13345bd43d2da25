"""The embedded demo: a small trained checkpoint in the official on-disk format.

It is what ``LLM()`` and ``deepinfer-jax generate`` use when no checkpoint is named, and the script
that trained it lies beside it.
"""
