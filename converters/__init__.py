"""Checkpoints in and out: the official safetensors folder to an orbax folder and back.

``safetensors_io`` reads and writes the container, ``names`` is the bijective table between official
tensor names and our tree, ``check`` reads headers only. No accelerator and no kernel is needed.
"""
