"""A transformer that reads Python's documentation letter by letter, and then writes some of its own."""

import argparse
from functools import partial
from pydoc_data.topics import topics  # the text that `help("assert")` shows: it comes with the interpreter

import torch
from torch import nn
from torch.utils.data import Dataset

import elasticflow as ef

TEXT = "\n".join(topics.values())
LETTERS = sorted(set(TEXT))
NUMBERS = {letter: number for number, letter in enumerate(LETTERS)}
LENGTH = 64


class Windows(Dataset):
    """Each sample is a piece of the text, and the same one letter later."""

    def __init__(self, text: str, num_samples: int):
        self.numbers = torch.tensor([NUMBERS[letter] for letter in text])
        self.starts = torch.linspace(0, len(text) - LENGTH - 1, num_samples).long()

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, index):
        start = self.starts[index]
        return {"letters": self.numbers[start : start + LENGTH], "following": self.numbers[start + 1 :][:LENGTH]}


class Reader(nn.Module):
    def __init__(self, width: int = 96, num_layers: int = 3):
        super().__init__()
        self.letter = nn.Embedding(len(LETTERS), width)
        self.place = nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = partial(nn.TransformerEncoderLayer, width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(layer() for _ in range(num_layers))
        self.out = nn.Linear(width, len(LETTERS))

    def forward(self, letters):
        length = letters.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.letter(letters) + self.place[:length]
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.out(hidden)


def model():
    return {"reader": Reader(), "optimizer": partial(torch.optim.AdamW, lr=0.002)}


def forward(letters, following, params):
    outputs = params["reader"](letters)
    loss = nn.functional.cross_entropy(outputs.flatten(0, 1), following.flatten())
    return {"loss": loss, "bits_per_letter": loss.detach() / torch.log(torch.tensor(2.0))}


@torch.no_grad()
def write(reader: nn.Module, start: str, num_letters: int) -> str:
    """Go on from a start, drawing each letter from what the model expects."""
    numbers = [NUMBERS[letter] for letter in start]
    for _ in range(num_letters):
        expected = reader(torch.tensor([numbers[-LENGTH:]]))[0, -1]
        numbers.append(int(torch.multinomial((expected / 0.7).softmax(0), 1)))
    return "".join(LETTERS[number] for number in numbers)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=8192, help="pieces of text in an epoch")
    parser.add_argument("--batch-size", type=int, default=32, help="samples per worker and step")
    args = parser.parse_args()

    torch.manual_seed(1)
    border = int(0.9 * len(TEXT))
    result = ef.train(
        model,
        forward,
        data=Windows(TEXT[:border], args.samples),
        validation=Windows(TEXT[border:], args.samples // 16),
        epochs=args.epochs,
        batch_size=args.batch_size,
        accelerator="cpu",
    )
    reader = result.model.eval().params["reader"]
    if result.model.trainer.is_global_zero:
        print(f"{write(reader, 'The statement', 200)}\n")
        print(f"bits per letter, in text that was not read: {result.metrics['val_bits_per_letter']:.2f}")


if __name__ == "__main__":
    main()
