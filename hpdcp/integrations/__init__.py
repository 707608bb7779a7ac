"""hpdcp under training frameworks, each in a module that only its users import: `lightning`.

Face: `lightning`.
"""
