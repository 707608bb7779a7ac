"""Other formats: checkpoints from and to Hugging Face folders, files of torch, and other layouts, in bounded memory.

In come two locations, out comes a record of what was converted.
Face: `transform`, `copy`, `locations`, `selection`, `stored_objects`, `tensor_streams`.
"""
