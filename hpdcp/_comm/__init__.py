"""How ranks talk: through a process group, through the storage, or not at all.

In comes what one rank says, out comes what all of them agreed on, or one error on every rank.
Face: `exchange` (the contract), `process_group`, `mailbox`.
"""
