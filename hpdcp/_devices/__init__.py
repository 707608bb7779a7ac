"""Torch's devices, and copies between them and the host.

In come tensors, out go bytes of host memory, or tensors filled. The only package that asks torch for a device's module.
Face: `device`, `copies`, `staging`.
"""
