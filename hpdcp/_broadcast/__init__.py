"""What several ranks want alike is read by one of them and sent to the others.

In come the load plans of all ranks, out comes the reader rank of each shared chunk, and then the chunks themselves.
Face: `terms`, `decision` (whether), `groups`, `reader_choice` (which rank), `walk` (the sending).
"""
