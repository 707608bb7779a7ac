"""Advice of the library in the words of the command line: commands and options in place of functions and arguments."""

from __future__ import annotations

import re
from typing import Final

WORDS: Final = {
    "src_platform='torch'": "`hpdcp convert torch-to-dcp`",
    'hpdcp.offline_transform.convert_full_checkpoint_to_dcp(..., src_platform="torch")': "`hpdcp convert torch-to-dcp`",
    "src_platform='huggingface'": "`hpdcp convert hf-to-dcp`",
    "convert_full_checkpoint_to_dcp": "`hpdcp convert hf-to-dcp`",
    "convert_dcp_to_huggingface": "`hpdcp convert dcp-to-hf`",
    "overwrite=True": "--overwrite",
    "choose a max_shard_size": "choose a --max-shard-size",
    "max_shard_size is": "--max-shard-size is",
    "cast it with dtype=": "cast it with --dtype",
    "dtype is {dtype": "--dtype is {dtype",
    "prefix and name_map do not": "--prefix and --name-map do not",
    "name_map maps": "--name-map maps",
    "FileSystemReader(allow_pickle=True)": "--allow-pickle",
    "hpdcp.config.using(backend=...)": "an option such as --backend",
    "checkpoint_id is": "the location is",
}
"""What messages say, as their source has it, up to a brace → what the command line says."""

_READER: Final = re.compile(r"HuggingFaceReader\(checkpoint_id, file=('[^']*')\) reads the weights there\.")
_WHOLE: Final = re.compile("|".join(rf"(?<![\w-]){re.escape(said.partition('{')[0])}" for said in WORDS))


def in_commands(message: str) -> str:
    """The message of an error, as the command line tells it.

    >>> in_commands("src_platform='torch' converts a single file.")
    '`hpdcp convert torch-to-dcp` converts a single file.'
    """
    message = _READER.sub(r"Give the file \1 itself to `hpdcp convert torch-to-dcp`.", message)
    return _WHOLE.sub(lambda found: _SAID[found[0]], message)


_SAID: Final = {said.partition("{")[0]: meant.partition("{")[0] for said, meant in WORDS.items()}
