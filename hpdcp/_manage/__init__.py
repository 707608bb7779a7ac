"""Questions about checkpoints that are there: what they hold, whether they are sound or equal; and their removal.

In comes a location, out comes a record; nothing is printed.
Face: `inspect`, `verify`, `compare`, `remove`.
"""
