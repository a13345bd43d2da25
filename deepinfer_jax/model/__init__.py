"""The model as pure functions over pytrees of weights, one mechanism a file.

Files are named as the model's report names the mechanism. Read ``transformer.py`` first: it puts
the others together. Nothing here knows about requests, pages or checkpoint files.
"""
