"""Short answers, compared as SQuAD does (Rajpurkar et al. 2016, the official evaluation script).

The standard library alone: environments use it in processes of their own.
"""

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import cast

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """Return a text in lower case, without punctuation, articles and superfluous space.

    Punctuation and articles stay where nothing else is there: the official script takes "A" and
    "the" for equal to no answer at all.

    Example:
        >>> normalised("The  Eiffel-Tower!")
        'eiffeltower'
    """
    lower = text.lower()
    bare = lower.translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", bare).split() or bare.split() or lower.split())


def exact_match(answer: str, gold: str) -> float:
    """Return 1.0 when both are the same text, once normalised."""
    return float(normalised(answer) == normalised(gold))


def token_f1(answer: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall of words, each as often as it stands there.

    Example: "Paris, France" for "Paris" has a precision of 1/2 and a recall of 1: 2/3.
    """
    given, wanted = normalised(answer).split(), normalised(gold).split()
    if not given or not wanted:
        return float(given == wanted)
    common = (Counter(given) & Counter(wanted)).total()
    return 2 * common / (len(given) + len(wanted))


def measures(answer: str | None, golds: Sequence[str]) -> dict[str, float]:
    """Return `em` and `f1` of an answer, each by the right answer that fits best; None: 0."""
    known = {"em": exact_match, "f1": token_f1}
    return {
        name: 0.0 if answer is None else max(measure(answer, gold) for gold in golds)
        for name, measure in known.items()
    }


def gold_answers(value: object) -> list[str]:
    """Return the right answers of a row's field: one, or a list of them.

    Raises:
        ValueError: There is none.
    """
    golds = cast("list[object]", value) if isinstance(value, list) else [value]
    if not golds or not all(isinstance(gold, str | int | float) for gold in golds):
        raise ValueError(f"a row needs an answer, text or a list of texts, not {value!r}")
    return [str(gold) for gold in golds]
