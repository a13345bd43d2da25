"""Serving: the jitted step, what schedules it, what samples from it, and where weights come from.

``engine.py`` is the front (``LLM``); ``step.py`` holds the compiled programs; ``scheduler.py`` and
``pages.py`` are plain Python without jax, so they can be tested by themselves.
"""
