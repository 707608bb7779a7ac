"""Questions about checkpoints that are there: what they hold, whether they are sound or equal; and their removal.

In comes a location, out comes a record; nothing is printed. The checkpoints of a run are kept here too:
    save      `run` settles how the save before went (`_run_saves`), and saves with `_step_facts` in the metadata
    due       `_schedule` asks the other ranks every so often whether one has got a signal (`_preemption`)
    look      `_run_folder` lists the steps (`_step_names`) and makes a `step_record` of each
    keep      `retention` judges the records, `prune` removes what is superfluous, `_background_pruning` behind saves;
              `_marks` say what is held, read or removed (`_holding`)
    load      `_run_loads` takes the newest step that is sound

Face: `inspect`, `verify`, `compare`, `remove`; `run`, `run_steps`, `step_record`, `retention`,
`prune`.
"""
