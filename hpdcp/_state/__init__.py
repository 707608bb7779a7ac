"""A state dict as boxes of tensors and Python values, each with a name.

In comes a nested state dict, out come leaves, boxes in global coordinates and encoded values; and back again.
Face: `tree`, `paths`, `objects`, `geometry`, `box_index`, `coverage`, `sharding`, `ties`, `ragged`,
`views`, `dtypes`, `mismatches`.
"""
