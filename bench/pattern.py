"""A regular expression as a flag's value."""

from __future__ import annotations

import argparse
import re


def pattern(text: str) -> re.Pattern[str]:
    """For argparse. Raises: ArgumentTypeError."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"expected a regular expression; {error}") from error
