"""What every other package stands on.

In come settings, and the failures of a store; out go a configuration, errors that say what to do, and the contract of a
byte store. Knows neither checkpoints nor torch, so that a backend and the command line can be imported without either.

    `errors`           the tree of errors
    `arguments`        what callers gave, refused by name where it is of another type
    `config`           settings: what can be set, where values come from, which one wins
    `backend`          the contract of a byte store, and what all backends check alike
    `locations`        what a path or a URL names
    `mounts`           which file system a local path stands on
    `timing`           the log, and how long each stage took
    `progress`         bars
    `saves_in_flight`  where this process saves in the background, and how to wait for it
    `processes`        which process did something, and whether it has ended
    `threads`          pools, and how many cores there are for them
    `splitting`        rows, batches and shares of bounded size
    `natural_order`    numbers in names by their value
    `renames`          earlier names that go on working

All of these are the face.
"""
