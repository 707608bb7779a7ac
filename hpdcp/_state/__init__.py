"""A state dict as boxes of tensors and Python values, each with a name.

In comes a nested state dict; out come leaves, boxes in global coordinates, and encoded values. Loaded values go back to
where the leaves were. Asks no other rank and touches no storage.

    `tree`        walking a state dict, and putting values back
    `paths`       where a value lies, as keys and as text
    `objects`     Python values as bytes, and back without running code
    `comparable`  whether two values are the same, and where they differ
    `geometry`    boxes of integers
    `coverage`    whether boxes cover another one
    `box_index`   which of many boxes meet one
    `sharding`    the chunks that a rank holds of a tensor
    `tensor_columns` what a rank holds of many tensors, gathered in one pass
    `ragged`      placements that divide unevenly
    `overlaps`    which tensors share elements in memory
    `ties`        which tensors are the same memory
    `views`       a box of a tensor in its own memory
    `dtypes`      torch's dtypes by name
    `scales`      which tensors hold codes, that other tensors scale
    `wrappers`    tensors made of other tensors, which fit only targets of their class
    `mismatches`  what does not fit between a state dict and a checkpoint

All of these are the face.
"""
