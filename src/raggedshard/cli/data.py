"""Training text that every machine has: the sources of Python's own standard library."""

import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BYTE_VOCABULARY = 257
"""256 byte values and the end of a file."""


@dataclass(frozen=True)
class Corpus:
    """A text as token ids, cut into batches that depend on nothing but the seed and the step.

    tokens: int64, shape (length,), each in ``[0, vocabulary)``.
    """

    tokens: np.ndarray
    vocabulary: int

    def batch(self, seed: int, step: int, size: int, context: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of one step, int64, both of shape (size, context); a target is the token after its input.

        Every process that asks for the same step gets the same rows: a rank trains on its slice of them.
        """
        starts = np.random.default_rng((seed, step)).integers(len(self.tokens) - context, size=(size, 1))
        windows = self.tokens[starts + np.arange(context + 1)]
        return windows[:, :-1], windows[:, 1:]


def byte_corpus() -> Corpus:
    """The standard library as bytes, with token 256 after each file."""
    parts = []
    for source in standard_library():
        parts += [np.frombuffer(source, dtype=np.uint8).astype(np.int64), np.array([BYTE_VOCABULARY - 1])]
    return Corpus(np.concatenate(parts), BYTE_VOCABULARY)


def word_corpus(vocabulary: int) -> Corpus:
    """The standard library as words, runs of spaces and single signs, the most frequent first.

    GPT-2's own tokenizer would have to be downloaded; what matters here is that the ids are spread over a vocabulary of
    its size. The last id stands for the end of a file and for what is too rare to have an id.
    """
    files = [re.findall(r"\w+|\s+|[^\w\s]", source.decode("utf-8", "replace")) for source in standard_library()]
    counts = Counter(word for words in files for word in words)
    ids = {word: index for index, (word, _) in enumerate(counts.most_common(vocabulary - 1))}
    last = vocabulary - 1
    tokens = [token for words in files for token in (*(ids.get(word, last) for word in words), last)]
    return Corpus(np.array(tokens), vocabulary)


def standard_library() -> list[bytes]:
    """The top-level sources of the running Python, by name. Raises FileNotFoundError where they are not installed."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    if not sources:
        raise FileNotFoundError(f"no Python sources in {folder}: this Python has its standard library without sources")
    return sources
