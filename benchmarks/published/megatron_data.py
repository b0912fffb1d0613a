"""Make up the data that Megatron-LM's functional tests read: vocabularies and token files of the names and sizes theirs
have, with other words in them. Run with Megatron-LM on the path.

    python -m benchmarks.published.megatron_data FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import compile_helpers

_WORD_PIECES: Final = {"vocab.txt": 30522, "bert-large-cased-vocab.txt": 28996}
_TOKENS: Final = {
    # documents, sentences of each, tokens of a sentence
    "my-t5_00_text_document": (12000, 1, 100),
    "my-bert_00_text_sentence": (2000, 8, 24),
}


def main() -> None:
    """Write them to the folder, and compile Megatron's helper, as its rank 0 does before the others read."""
    compile_helpers()
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True)
    for name, size in _WORD_PIECES.items():
        pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{number}" for number in range(size - 5))]
        (folder / name).write_text("\n".join(pieces) + "\n", encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    for name, (documents, sentences, tokens) in _TOKENS.items():
        builder = IndexedDatasetBuilder(str(folder / f"{name}.bin"), dtype=numpy.uint16)
        for _ in range(documents):
            for _ in range(sentences):
                builder.add_item(torch.randint(5, min(_WORD_PIECES.values()), (tokens,), generator=generator))
            builder.end_document()
        builder.finalize(str(folder / f"{name}.idx"))


if __name__ == "__main__":
    main()
