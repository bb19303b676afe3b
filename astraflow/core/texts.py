"""Texts that anything can write."""


def whole_text(text: str) -> str:
    """Return a text with the replacement character for each half of a surrogate pair.

    JSON can say such a half, and a text that was cut within an emoji has one; it is no UTF-8.
    """
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
