"""How ranks talk: through a process group, through the storage, or not at all.

In comes what one rank says, out comes what all of them agreed on, or one error on every rank. Face:

    `exchange`        the contract: steps that succeed on all ranks or fail on all
    `process_group`   over torch's process groups
    `mailbox`         over small files on the storage; imports nothing of torch
    `identity`        rank, world size, and ids that are equal on all ranks
"""
