"""Last words: what a server's log says of its end."""

import re

_KEPT_LINES = 15
_KEPT_ERRORS = 5
_KEPT_LENGTH = 500
# The line of a traceback that names the error, bare or behind a logger's prefix.
_NAMED = re.compile(
    r"^(?:\([^)]*\) )?(?:[A-Z]+ [\d:./ -]+\[[^\]]*\] )?((?:\w+\.)*\w+(?:Error|Exception): .+)$",
    re.MULTILINE,
)


def last_words(log: str) -> str:
    """Return the errors that a log names, the first ones first, and its last lines.

    A server of several processes ends with the errors of those that waited for the one that
    failed; what that one said stands far above.
    """
    errors = [said[:_KEPT_LENGTH] for said in dict.fromkeys(_NAMED.findall(log))][:_KEPT_ERRORS]
    lines = log.splitlines()
    last = lines[-_KEPT_LINES:]
    return "\n".join([*errors, "..." if len(lines) > len(last) else "", *last]).strip()
