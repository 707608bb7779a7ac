"""Saves that go on while training does, in a process of their own that every rank has: its worker.

In comes a state dict, out comes a response that says, later, how the save went.

The trainer, in the call of `async_save`:
    stage     `_what_to_stage` plans what this rank holds; `_staging` copies it into an `_arena` of shared memory,
              Python values by `data_copier`
    submit    `_worker_client` starts the worker, with the trainer's `_environment`, and sends it a `_save_job`, whose
              `_specs` say how to make writer and planner again
    wait      `_save_in_flight`, on a thread: stage further waves where the state is large, take the answer, set the
              `response`; `_background_saves` knows what is in flight and what failed
The worker, `worker`:
    receive   `_messages` on a socket, descriptors of shared memory among them
    plan      over `_worker_exchange` with the workers of the other ranks, by a `_staged_planner`
    write     as `save` does, out of the shared memory
    answer    the metadata, or the error

Face: `async_save`, `response`, `data_copier`, and `worker`, which is started as `python -m hpdcp._background.worker`.
"""
