"""Accuracy of answers to visual questions (docs/equations.md#vqa-accuracy), Antol et al. 2015.

    accuracy = mean over the ten sets of nine people of min(people in the set who gave the answer / 3, 1)

Answers are compared after normalization, unless all people agree: lower case, no articles, number words as
digits, punctuation removed, contractions with their apostrophe. Normalization is that of the data set's
evaluation code (vqaEval.py of github.com/GT-Vision-Lab/VQA), table by table.
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
PERIOD = re.compile(r"\.(?![0-9])")  # not a decimal point
MOST_PERIODS = 32  # the evaluation code passes the flag re.UNICODE, 32, where re.sub takes a count
COMMA_IN_NUMBER = re.compile(r"[0-9],[0-9]")
CONTRACTED = """
    aint=ain't arent=aren't cant=can't couldve=could've couldnt=couldn't couldn'tve=couldn't've
    couldnt've=couldn't've didnt=didn't doesnt=doesn't dont=don't hadnt=hadn't hadnt've=hadn't've
    hadn'tve=hadn't've hasnt=hasn't havent=haven't hed=he'd hed've=he'd've he'dve=he'd've hes=he's
    howd=how'd howll=how'll hows=how's Id've=I'd've I'dve=I'd've Im=I'm Ive=I've isnt=isn't itd=it'd
    itd've=it'd've it'dve=it'd've itll=it'll let's=let's maam=ma'am mightnt=mightn't mightnt've=mightn't've
    mightn'tve=mightn't've mightve=might've mustnt=mustn't mustve=must've neednt=needn't notve=not've
    oclock=o'clock oughtnt=oughtn't ow's'at='ow's'at 'ows'at='ow's'at 'ow'sat='ow's'at shant=shan't
    shed've=she'd've she'dve=she'd've she's=she's shouldve=should've shouldnt=shouldn't
    shouldnt've=shouldn't've shouldn'tve=shouldn't've somebody'd=somebodyd somebodyd've=somebody'd've
    somebody'dve=somebody'd've somebodyll=somebody'll somebodys=somebody's someoned=someone'd
    someoned've=someone'd've someone'dve=someone'd've someonell=someone'll someones=someone's
    somethingd=something'd somethingd've=something'd've something'dve=something'd've
    somethingll=something'll thats=that's thered=there'd thered've=there'd've there'dve=there'd've
    therere=there're theres=there's theyd=they'd theyd've=they'd've they'dve=they'd've theyll=they'll
    theyre=they're theyve=they've twas='twas wasnt=wasn't wed've=we'd've we'dve=we'd've weve=we've
    werent=weren't whatll=what'll whatre=what're whats=what's whatve=what've whens=when's whered=where'd
    wheres=where's whereve=where've whod=who'd whod've=who'd've who'dve=who'd've wholl=who'll whos=who's
    whove=who've whyll=why'll whyre=why're whys=why's wont=won't wouldve=would've wouldnt=wouldn't
    wouldnt've=wouldn't've wouldn'tve=wouldn't've yall=y'all yall'll=y'all'll y'allll=y'all'll
    yall'd've=y'all'd've y'alld've=y'all'd've y'all'dve=y'all'd've youd=you'd youd've=you'd've
    you'dve=you'd've youll=you'll youre=you're youve=you've
"""  # the 120 of the evaluation code, its oddities too: text is in lower case, so "Im" is never found
CONTRACTIONS: dict[str, str] = dict(pair.split("=") for pair in CONTRACTED.split())


def normalize_answer(answer: str) -> str:
    """An answer as it is compared with others.

    Examples:
        >>> normalize_answer("The two dogs!")
        '2 dogs'
    """
    text = _one_line(answer)
    in_number = COMMA_IN_NUMBER.search(text) is not None
    plain = text
    for mark in PUNCTUATION:
        beside_space = f"{mark} " in text or f" {mark}" in text
        plain = plain.replace(mark, "" if beside_space or in_number else " ")
    words = [NUMBERS.get(word, word) for word in PERIOD.sub("", plain, count=MOST_PERIODS).lower().split()]
    return " ".join(CONTRACTIONS.get(word, word) for word in words if word not in ARTICLES)


def _one_line(answer: str) -> str:
    return answer.replace("\n", " ").replace("\t", " ").strip()


def vqa_accuracy(answer: str, answers: Sequence[str]) -> float:
    """How well an answer agrees with those of ten people, from 0 to 1.

    Examples:
        >>> vqa_accuracy("red", ["red", "red", "dark red", *["blue"] * 7])
        0.6
    """
    given = _one_line(answer)
    people = [_one_line(one) for one in answers]
    if len(set(people)) > 1:
        given, people = normalize_answer(given), [normalize_answer(one) for one in people]
    same = [one == given for one in people]
    total = sum(same)
    return sum(min((total - agrees) / 3, 1) for agrees in same) / len(same)
