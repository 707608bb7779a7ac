"""Torch's devices, and copies between them and the host.

In come tensors, out go bytes of host memory, or tensors filled. The only package that asks torch for a device's module.
Nobody here waits for a whole device that has streams: training may go on there.

    `memory`      where a tensor lies, once it is known to lie inside its storage
    `memory_runs` where many tensors lie, found at once
    `device`      a tensor's bytes, blocking copies, torch's module for a device
    `streams`     the stream of a device for copies beside its work, and what comes before and after what
    `buffers`     memory to copy through, page-locked where that can be had
    `downloads`   device to host, one tensor after another: the next batch is copied while one is used
    `uploads`     host to device: memory is filled again while what it held before is copied
    `byte_pieces` the bytes of a tensor of any device, to be checksummed and written
    `samples`     checksums of some bytes of many tensors, fetched together
    `staging`     host and devices to shared memory, all at once

All of these are the face.
"""
