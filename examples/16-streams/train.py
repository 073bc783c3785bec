"""A small network learns to predict the next letter, from a stream of files that is dealt exactly once per epoch."""

import argparse
from functools import partial
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics  # the text that `help("assert")` shows: it comes with the interpreter
from uuid import uuid4

import torch
from torch import nn
from torch.utils.data import DataLoader

import elasticflow as ef

LENGTH = 32
LETTERS = sorted(set("\n".join(topics.values())))
NUMBERS = {letter: number for number, letter in enumerate(LETTERS)}


def write_files(folder: Path, num_files: int) -> None:
    """Write the text as files of lines; their lengths differ, as those of real files do."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(topics)
    for number in range(num_files):
        text = "\n".join(topics[name] for name in names[number::num_files])
        pieces = [text[start : start + LENGTH + 1] for start in range(0, len(text) - LENGTH, LENGTH)]
        new = folder / f".{uuid4().hex}"  # another worker may write this file at the same time
        new.write_text("\n".join(piece.replace("\n", "¶") for piece in pieces))
        new.replace(folder / f"{number:03}.txt")


class Lines:
    """Files of lines: each file is a shard, each line is a sample."""

    def __init__(self, folder: Path):
        self.folder = folder

    def shards(self):
        return sorted(str(path) for path in self.folder.glob("*.txt"))

    def open(self, shard, offset):
        with open(shard) as lines:
            for line in islice(lines, offset, None):
                numbers = torch.tensor([NUMBERS[letter] for letter in line.rstrip("\n").replace("¶", "\n")])
                yield {"letters": numbers[:-1], "following": numbers[1:]}


def model():
    reader = nn.Sequential(
        nn.Embedding(len(LETTERS), 32),
        nn.Linear(32, 128),
        nn.ReLU(),
        nn.Linear(128, len(LETTERS)),
    )
    return {"reader": reader, "optimizer": partial(torch.optim.AdamW, lr=0.003)}


def forward(letters, following, params):
    outputs = params["reader"](letters)
    return {"loss": nn.functional.cross_entropy(outputs.flatten(0, 1), following.flatten())}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--files", type=int, default=24, help="number of files")
    parser.add_argument("--folder", type=Path, default=Path("build/streams"), help="where the files are written")
    parser.add_argument("--data-workers", type=int, default=1, help="processes that read, for each worker")
    args = parser.parse_args()

    torch.manual_seed(1)
    write_files(args.folder, args.files)
    stream = ef.StreamDataset(Lines(args.folder), shuffle=True, shuffle_buffer=200)
    loader = DataLoader(stream, batch_size=16, num_workers=args.data_workers)
    result = ef.train(model, forward, loader, epochs=args.epochs, enable_progress_bar=False, logger=False)
    if result.model.trainer.is_global_zero:
        print(f"loss: {float(result.metrics['loss']):.2f}", flush=True)


if __name__ == "__main__":
    main()
