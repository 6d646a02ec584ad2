"""Creates a folder atomically: it appears complete or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """Yields a hidden temporary folder that is renamed to `out` when the block ends.

    If the block raises, the temporary folder is deleted.

    Args:
        out: Path of the folder. It must be free when the block ends.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        yield folder
        folder.chmod(0o755)
        folder.replace(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
