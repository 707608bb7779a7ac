"""Saves that go on while training does.

In comes a state dict, which is copied into shared memory; out comes a response that says, later, how the save went.
Face: `async_save`, `response`, `data_copier`, and `worker`, the process that writes.
"""
