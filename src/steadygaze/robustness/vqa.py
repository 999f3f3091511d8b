"""Accuracy of answers to visual questions (docs/equations.md#vqa-accuracy), Antol et al. 2015.

    accuracy = mean over the ten sets of nine people of min(people in the set who gave the answer / 3, 1)

Answers are compared after normalization, unless all people agree: lower case, no articles, number words as
digits, punctuation removed, contractions with their apostrophe.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

ARTICLES = ("a", "an", "the")
NUMBERS = {
    word: str(value)
    for value, word in enumerate(
        ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    )
} | {"none": "0"}
PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'
PERIOD = re.compile(r"\.(?!\d)")  # not a decimal point
COMMA_IN_NUMBER = re.compile(r"\d,\d")
CONTRACTED = """
    ain't aren't can't couldn't could've didn't doesn't don't hadn't hasn't haven't he'd he's how'd
    how'll how's i'm i've isn't it'd it'll ma'am mightn't might've mustn't must've needn't o'clock
    oughtn't shan't she's shouldn't should've somebody's someone's something's that's there'd there's
    they'd they'll they're they've wasn't we've weren't what'll what're what's what've when's where'd
    where's where've who'd who'll who's who've why'll why're why's won't wouldn't would've y'all you'd
    you'll you're you've
"""
CONTRACTIONS = {word.replace("'", ""): word for word in CONTRACTED.split()}


def normalize_answer(answer: str) -> str:
    """An answer as it is compared with others.

    Examples:
        >>> normalize_answer("The two dogs!")
        '2 dogs'
    """
    text = " ".join(answer.split())
    in_number = COMMA_IN_NUMBER.search(text) is not None
    plain = text
    for mark in PUNCTUATION:
        beside_space = f"{mark} " in text or f" {mark}" in text
        plain = plain.replace(mark, "" if beside_space or in_number else " ")
    words = [NUMBERS.get(word, word) for word in PERIOD.sub("", plain).lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def vqa_accuracy(answer: str, answers: Sequence[str]) -> float:
    """How well an answer agrees with those of ten people, from 0 to 1.

    Examples:
        >>> vqa_accuracy("red", ["red", "red", "dark red", *["blue"] * 7])
        0.6
    """
    given = " ".join(answer.split())
    people = [" ".join(one.split()) for one in answers]
    if len(set(people)) > 1:
        given, people = normalize_answer(given), [normalize_answer(one) for one in people]
    same = [one == given for one in people]
    total = sum(same)
    return sum(min((total - agrees) / 3, 1) for agrees in same) / len(same)
