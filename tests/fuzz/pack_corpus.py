"""Pack the inputs of the working folder into tests/fuzz/corpus.zip: small, the same bytes for the same inputs."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

TARGET = Path(__file__).with_name("corpus.zip")


def main() -> int:
    """Write the archive; exit code 1 if there is nothing to pack."""
    inputs = sorted(path for path in Path().iterdir() if path.is_file())
    if not inputs:
        print("no inputs in this folder", file=sys.stderr)
        return 1
    with zipfile.ZipFile(TARGET, "w", zipfile.ZIP_LZMA) as archive:
        for path in inputs:
            archive.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_LZMA)
    print(f"{len(inputs)} inputs, {TARGET.stat().st_size} bytes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
