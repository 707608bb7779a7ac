"""What several ranks want alike is read by one of them and sent to the others.

In come the load plans of all ranks with what each asks for, out comes the reader rank of each shared chunk; then, on
every rank, the chunks themselves in their targets.
Face: `terms` (what ranks tell one another), `decision` (whether, by the coordinator), `reader_choice` (which rank reads
what), `groups` (the process groups of one load), `walk` (reading and sending).
"""
