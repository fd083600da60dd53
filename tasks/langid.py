"""Language identification with fastText's lid.176.ftz (176 languages, CC-BY-SA-3.0), through fasttext-community.

echo "ceci est une phrase" | python -m tasks.langid data/acquire/models/lid.176.ftz
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_SPACE = re.compile(r"\s+")
_LABEL = "__label__"


class LanguageIdentifier:
    """Wraps one model file. ValueError when the file is not a fastText model."""

    def __init__(self, model: str | Path, chars: int = 3000):
        import fasttext

        self.chars = chars
        try:
            self._model = fasttext.load_model(str(model))
        except (ValueError, OSError) as error:
            raise ValueError(f"{model}: not a fastText language model ({error})") from None

    def identify(self, text: str) -> tuple[str, float]:
        """(ISO 639 code, confidence in 0..1) of the text's first `chars` characters; ("", 0.0) when it has no letters."""
        line = _SPACE.sub(" ", text[: self.chars]).strip()
        if not any(c.isalpha() for c in line):
            return "", 0.0
        labels, scores = self._model.predict(line, k=1)
        if not labels:
            return "", 0.0
        return labels[0].removeprefix(_LABEL), round(min(1.0, float(scores[0])), 4)


def main() -> None:
    identifier = LanguageIdentifier(sys.argv[1])
    for line in sys.stdin:
        print(*identifier.identify(line), line.rstrip(), sep="\t")


if __name__ == "__main__":
    main()
