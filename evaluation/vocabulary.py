"""The words that tasks are made of: keys, numbers, variable names and invented words, all from a random generator."""

from collections.abc import Callable, Iterator
from random import Random

ADJECTIVES = (
    "able amber ancient bitter bold brave brisk broad calm careful cheerful clever cold copper curious dark deep "
    "dry early eager faint fancy fierce gentle golden grand green happy heavy hollow humble icy iron jolly keen "
    "kind late lazy light little lively loud lucky mellow mild narrow neat nimble noble odd pale patient plain "
    "polite proud purple quick quiet rapid rare red rough round royal rusty salty sandy sharp shiny silent silver "
    "slow small smooth soft solid sour spare steady steep stormy strong sturdy sunny sweet swift tall tender thin "
    "tidy tiny vast warm weary wild wise witty wooden young"
).split()
NOUNS = (
    "acorn anchor apple arrow badger barrel basket beacon bell bottle branch bridge bucket button cabin candle "
    "canyon carpet castle cellar chapel cherry clock cloud compass corner cottage crane creek cricket crown "
    "desert donkey drum eagle engine falcon feather ferry fiddle flute forest fountain fox garden glacier hammer "
    "harbor harvest hedge heron hill island jacket kettle kitten ladder lantern lemon library lizard magnet "
    "market meadow mirror mountain needle oak ocean orchard otter owl paddle parrot pebble pencil pepper piano "
    "pigeon pillow planet pocket pond quarry rabbit raven ribbon river robin rocket saddle sailor shadow shovel "
    "spider spoon stable station stone stove teapot temple thistle thunder tower tractor tunnel turtle valley "
    "velvet violin wagon walnut whistle willow window"
).split()
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
MOST_MISSES = 10_000
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def keys(random: Random, avoid: str) -> Iterator[str]:
    """Yields distinct keys such as `copper-lantern` that do not occur in the text `avoid`."""
    return _distinct(lambda: f"{random.choice(ADJECTIVES)}-{random.choice(NOUNS)}", avoid)


def numbers(random: Random, avoid: str, digits: int = 7) -> Iterator[str]:
    """Yields distinct decimal numbers of exactly `digits` digits, none starting with 0 or occurring in `avoid`."""
    return _distinct(lambda: str(random.randrange(10 ** (digits - 1), 10**digits)), avoid)


def variable_names(random: Random, avoid: str) -> Iterator[str]:
    """Yields distinct names of five capital letters that do not occur in `avoid`."""
    return _distinct(lambda: "".join(random.choice(LETTERS) for _ in range(5)), avoid)


def invented_words(random: Random) -> Iterator[str]:
    """Yields distinct six-letter words such as `bokune`; of one length, so that none is part of another."""
    return _distinct(lambda: "".join(random.choice(CONSONANTS) + random.choice(VOWELS) for _ in range(3)), "")


def _distinct(draw: Callable[[], str], avoid: str) -> Iterator[str]:
    drawn: set[str] = set()
    misses = 0
    while misses < MOST_MISSES:
        word = draw()
        if word in drawn or word in avoid:
            misses += 1
        else:
            drawn.add(word)
            misses = 0
            yield word
    raise ValueError(f"{MOST_MISSES} words in a row, {word!r} the last, were taken or stand in the text")
