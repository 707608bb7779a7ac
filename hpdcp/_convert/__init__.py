"""Other formats: checkpoints from and to Hugging Face folders, files of torch, and other layouts, in bounded memory.

In come two locations, out comes a record of what was converted.
Face: what converts (`to_checkpoint`, `to_huggingface`, `to_torch_file`, `to_state_dict`, `copy`), its record
(`conversion`), and what reads stored tensors and Python values in bounded memory (`tensor_streams`, `stored_objects`).
"""
