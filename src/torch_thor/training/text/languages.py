"""The languages whose sentence ends the library sentencex knows."""

import re
from collections.abc import Callable

from torch_thor.training.errors import require

# The languages for which sentencex has rules of its own. It has no function that lists them.
RULES = (
    "am", "ar", "bg", "bn", "ca", "da", "de", "el", "en", "es", "fi", "fr", "gu", "hi", "hy", "it", "ja", "kk", "kn",
    "ml", "mr", "my", "nl", "pa", "pl", "pt", "ru", "sk", "ta", "te", "uk",
)  # fmt: skip
_CODE = re.compile(r"[a-z]{2,3}(-[a-z0-9]+)*")


def check_language(language: str, say: Callable[[str], None]) -> None:
    """Check the language code of a corpus.

    For other languages than those of `RULES`, sentencex documents that it uses the rules of a related language, and of
    English if it knows none.

    Args:
        language: The code.
        say: Prints a line; it is called for a language without rules of its own.

    Raises:
        UserError: If the value does not have the form of a language code, such as `de` or `zh-hans`.
    """
    require(
        _CODE.fullmatch(language) is not None,
        f"--language {language} is not a language code in lower case, such as en: sentencex has rules for "
        f"{', '.join(RULES)}",
    )
    if language not in RULES:
        say(
            f"--language {language}: sentencex has no rules of its own for it, and uses those of a related language, "
            f"or of English if it knows none; it has rules for {', '.join(RULES)}"
        )
