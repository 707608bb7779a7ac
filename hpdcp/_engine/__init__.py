"""The verbs: one path that every save takes, one that every load takes, and the states of a fresh optimizer.

In comes a state dict, out comes a published checkpoint; or the state dict, filled.
Face: `verbs`, `save`, `load`, `optimizer_state`, `from_pretrained`.
"""
