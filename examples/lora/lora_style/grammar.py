"""Synthetic text of two small grammars: a base language, and the style in which clients write. Nothing is downloaded.

Base: determiner, adjective, noun, verb, object, adverb. Style: the verb comes last, adjectives follow their nouns, the adverb
comes first, and other verbs and adverbs are common.
"""

import random

import torch
from torch import Tensor

DETERMINERS = ["the", "a", "this", "every"]
ADJECTIVES = ["old", "small", "quiet", "bright", "heavy", "green", "narrow", "young", "cold", "broken", "clever", "tired"]
NOUNS = [
    "river",
    "farmer",
    "letter",
    "garden",
    "doctor",
    "window",
    "bridge",
    "teacher",
    "market",
    "engine",
    "harbour",
    "painter",
    "forest",
    "kettle",
    "sailor",
    "mirror",
    "baker",
    "tower",
    "pilot",
    "basket",
    "hunter",
    "candle",
    "singer",
    "wagon",
]
VERBS = [
    "sees",
    "finds",
    "carries",
    "follows",
    "repairs",
    "paints",
    "leaves",
    "keeps",
    "crosses",
    "watches",
    "hides",
    "sells",
    "builds",
    "opens",
    "reads",
    "wants",
]
ADVERBS = ["today", "slowly", "again", "often", "quietly", "never", "soon", "twice"]
PREPOSITIONS = ["near", "behind", "under", "without", "beside", "above"]
PAD, END = "<pad>", "."
WORDS = (PAD, END, *DETERMINERS, *ADJECTIVES, *NOUNS, *VERBS, *ADVERBS, *PREPOSITIONS)
NUMBERS = {word: number for number, word in enumerate(WORDS)}
# The maximum number of tokens of a sentence; shorter sentences are padded, and no loss counts the padding.
LENGTH = 16
NO_TARGET = -100


class Writer:
    """A writer of random sentences.

    Args:
        seed: seed of all its sentences.
        style: whether it writes in the clients' style; else in the base language.
        topics: number of preferred nouns, used half of the time; 0: no preference.
    """

    def __init__(self, seed: int, *, style: bool, topics: int = 0) -> None:
        self._draws, self._style = random.Random(seed), style
        self._topics = self._draws.sample(NOUNS, topics)

    def sentence(self) -> list[str]:
        """Return the words of a sentence."""
        subject, thing, verb, adverb = self._noun(), self._noun(), [self._word(VERBS)], []
        if self._draws.random() < 0.5:
            adverb = [self._word(ADVERBS)]
        ordered = [adverb, subject, thing, verb] if self._style else [subject, verb, thing, adverb]
        return [*(word for part in ordered for word in part), END]

    def _noun(self) -> list[str]:
        adjective = [self._word(ADJECTIVES)] if self._draws.random() < 0.5 else []
        liked = self._topics and self._draws.random() < 0.5
        noun = [self._draws.choice(self._topics) if liked else self._word(NOUNS)]
        place = [self._word(PREPOSITIONS), "the", self._word(NOUNS)] if self._draws.random() < 0.2 else []
        return [self._word(DETERMINERS), *([*noun, *adjective] if self._style else [*adjective, *noun]), *place]

    def _word(self, words: list[str]) -> str:
        """Return a random word: the first words of a list are common; in the style the last verbs and adverbs are."""
        position = min(int(self._draws.expovariate(4 / len(words))), len(words) - 1)
        return words[-1 - position] if self._style and words in (VERBS, ADVERBS) else words[position]


def records(writer: Writer, count: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets [count, LENGTH] of sentences; every target is the next word."""
    inputs = torch.full((count, LENGTH), NUMBERS[PAD])
    targets = torch.full((count, LENGTH), NO_TARGET)
    for row in range(count):
        numbers = [NUMBERS[END], *(NUMBERS[word] for word in writer.sentence())][: LENGTH + 1]
        inputs[row, : len(numbers) - 1] = torch.tensor(numbers[:-1])
        targets[row, : len(numbers) - 1] = torch.tensor(numbers[1:])
    return inputs, targets
