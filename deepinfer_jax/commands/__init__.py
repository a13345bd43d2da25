"""The longer commands of the command line; `cli.py` has the parser and the short ones."""
