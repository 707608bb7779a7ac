"""What every other package stands on.

Errors, configuration, timing, progress, threads and the contract of a byte store. Knows neither checkpoints nor torch,
so that a backend and the command line can be imported without either.
Face: `errors`, `config`, `timing`, `progress`, `threads`, `backend`, `locations`,
`mounts`, `natural_order`, `renames`, `splitting`.
"""
