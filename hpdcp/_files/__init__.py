"""A plan as files of one backend: layouts, the reading engine, the commit, and folders that other programs wrote.

In comes a rank's plan, out come files and one published metadata file; or a filled plan of a load.
Face: `registry`, `commit`, `lease`, `leftovers`, `publish`, `writer`, `reader`, `rank_sets`, `save_identity`, `layout`,
`safetensors_layout`, `read_engine`, `run_reads`, `box_reads`, `block_checker`, `parallel`, and
`huggingface_reader`, `huggingface_folder`, `huggingface_names`, `torch_folder`, `torch_layout`, `foreign`, `links`.
"""
