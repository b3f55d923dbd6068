"""Grade-school arithmetic word problems with worked steps, in the answer format of GSM8K.

The held-out set is disjoint from the training set by construction: whether a problem is held out depends only on a
hash of its template and numbers, so no choice of seed, names or items can put the same sum on both sides.
"""

import hashlib
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "heldout"]

END = "<|end|>"  # end-of-text token
HELD_OUT_EVERY = 8  # one (template, numbers) pair in so many
LARGEST = 30  # no number in a problem or its solution is larger
NAMES = ("Mia Leo Anna Ben Sara Tom Nora Max Ella Sam Ivy Jack Lucy Omar Zoe Paul Rosa Finn Kim Noah").split()
ITEMS = (
    "apples pears books coins cards shells stamps pens marbles plums stickers cookies balloons flowers toys "
    "lemons buttons beads candles nuts"
).split()


@dataclass(frozen=True)
class Problem:
    question: str
    solution: str
    answer: int


@dataclass(frozen=True)
class Template:
    """`ranges` draws the numbers; [x=a+b] in `solution` is worked out, shown as 3+4=7, and names its result."""

    ranges: dict[str, tuple[int, int]]
    question: str
    solution: str


TEMPLATES = (
    Template(
        {"a": (2, 15), "b": (2, 15)},
        "{n} has {a} {i}. {m} gives {n} {b} more. How many {i} does {n} have now?",
        "{n} has [x=a+b] {i} now.",
    ),
    Template(
        {"a": (5, 30), "b": (2, 15)},
        "{n} has {a} {i} and gives {b} of them to {m}. How many {i} are left?",
        "{n} has [x=a-b] {i} left.",
    ),
    Template(
        {"a": (2, 6), "b": (2, 6), "c": (2, 15)},
        "There are {a} boxes with {b} {i} each. {n} takes {c} {i} out. How many {i} are left?",
        "The boxes hold [x=a*b] {i}. There are [y=x-c] {i} left.",
    ),
    Template(
        {"a": (2, 6), "b": (2, 6), "c": (8, 30)},
        "{n} buys {a} {i} for {b} dollars each and pays with {c} dollars. How many dollars does {n} get back?",
        "The {i} cost [x=a*b] dollars. {n} gets [y=c-x] dollars back.",
    ),
    Template(
        {"a": (4, 30), "b": (2, 6)},
        "{n} shares {a} {i} equally among {b} friends. How many {i} does each friend get?",
        "Each friend gets [x=a/b] {i}.",
    ),
    Template(
        {"a": (2, 8), "b": (2, 5)},
        "{n} has {a} {i}. {m} has {b} times as many. How many {i} do they have together?",
        "{m} has [x=a*b] {i}. Together they have [y=a+x] {i}.",
    ),
    Template(
        {"a": (2, 15), "b": (2, 15), "c": (2, 6)},
        "{n} picks {a} {i} and then {b} more, and packs them into bags of {c}. How many bags does {n} fill?",
        "{n} picks [x=a+b] {i}. That fills [y=x/c] bags.",
    ),
    Template(
        {"a": (2, 12), "b": (2, 15)},
        "{n} has {a} {i}. {m} has {b} more than {n}. How many {i} do they have together?",
        "{m} has [x=a+b] {i}. Together they have [y=a+x] {i}.",
    ),
    Template(
        {"a": (5, 25), "b": (2, 15), "c": (2, 15)},
        "There are {a} people on a bus. Then {b} people get off and {c} get on. How many people are on the bus now?",
        "[x=a-b] people stay. Then [y=x+c] people are on the bus.",
    ),
    Template(
        {"a": (2, 6), "b": (2, 4), "c": (2, 4)},
        "{n} earns {a} dollars an hour and works {b} hours on Monday and {c} hours on Friday. "
        "How many dollars does {n} earn?",
        "{n} works [x=b+c] hours. {n} earns [y=a*x] dollars.",
    ),
    Template(
        {"a": (2, 6), "b": (2, 6), "c": (2, 15)},
        "A room has {a} rows of {b} chairs. {n} brings {c} more chairs. How many chairs are in the room?",
        "The rows have [x=a*b] chairs. There are [y=x+c] chairs in the room.",
    ),
    Template(
        {"a": (3, 15), "b": (2, 10), "c": (2, 10)},
        "{n} is {a} years old. {m} is {b} years older. How old will {m} be in {c} years?",
        "{m} is [x=a+b] years old. In {c} years {m} will be [y=x+c] years old.",
    ),
    Template(
        {"a": (8, 30), "b": (2, 6), "c": (2, 4)},
        "A shop has {a} {i}. It sells {b} on Monday and {c} times as many on Friday. How many {i} are left?",
        "On Friday it sells [x=b*c] {i}. In all it sells [y=b+x] {i}. There are [z=a-y] {i} left.",
    ),
)

_STEP = re.compile(r"\[(\w)=(\w)([-+*/])(\w)\]")


def held_out(template: int, numbers: tuple[int, ...]) -> bool:
    digest = hashlib.sha256(f"{template}:{numbers}".encode()).digest()
    return digest[0] % HELD_OUT_EVERY == 0


def _apply(op: str, a: int, b: int) -> int | None:
    """None where a child would not be asked: negative, zero, fractional or large results."""
    if op == "/" and a % b:
        return None
    value = {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[op]
    return value if 0 < value <= LARGEST else None


def _solve(solution: str, numbers: dict[str, int]) -> tuple[str, int] | None:
    values, last = dict(numbers), 0
    for name, left, op, right in _STEP.findall(solution):
        result = _apply(op, values[left], values[right])
        if result is None:
            return None
        values[name] = last = result
    steps = _STEP.sub(lambda s: f"{values[s[2]]}{s[3]}{values[s[4]]}={values[s[1]]}", solution)
    return steps, last


def problems(split: Split, n: int, seed: int = 0) -> Iterator[Problem]:
    """n problems of one side of the split; the same arguments give the same problems on every machine."""
    rng = random.Random(f"{split} {seed}")
    while n:
        index = rng.randrange(len(TEMPLATES))
        template = TEMPLATES[index]
        numbers = {k: rng.randint(*bounds) for k, bounds in template.ranges.items()}
        while (solved := _solve(template.solution, numbers)) is None:
            numbers = {k: rng.randint(*bounds) for k, bounds in template.ranges.items()}
        if held_out(index, tuple(numbers.values())) != (split == "heldout"):
            continue
        words = dict(zip("nm", rng.sample(NAMES, 2), strict=True)) | {"i": rng.choice(ITEMS)}
        yield Problem(template.question.format(**numbers, **words), solved[0].format(**numbers, **words), solved[1])
        n -= 1


def prompt(p: Problem) -> str:
    return f"Q: {p.question}\nA:"


def completion(p: Problem) -> str:
    return f" {p.solution}\n#### {p.answer}{END}"


def score(text: str) -> int | None:
    """The number after the first ####, or None."""
    found = re.search(r"#### (\d+)", text)
    return int(found[1]) if found else None
