"""`fxmem cache`."""

from __future__ import annotations

import argparse

from fxmem.cli.kept import cache_folder, entries
from fxmem.cli.parser import argument
from fxmem.errors import UsageError
from fxmem.records.units import format_bytes

BRIEF = "results kept from earlier commands: show or clear"
DESCRIPTION = (
    "Results are kept, and used again where neither the command, the model's files, the packages nor the environment "
    "have changed. FXMEM_CACHE_DIR says where; empty, nothing is kept; with FXMEM_NO_CACHE no results are."
)

EXAMPLES = (
    "fxmem cache show",
    "fxmem cache clear",
)

ARGUMENTS = (argument("action", choices=("show", "clear"), metavar="ACTION", help="show or clear"),)


def run(options: argparse.Namespace) -> tuple[int, str]:
    """Run `fxmem cache`; return the exit code and the text for stdout."""
    folder = cache_folder()
    if folder is None:
        return 0, "nothing is kept: FXMEM_CACHE_DIR is empty, or there is no home directory"
    found = entries(folder)
    count = f"{len(found)} result{'s' * (len(found) != 1)}, {format_bytes(sum(path.lstat().st_size for path in found))}"
    if options.action == "clear":
        try:
            for path in found:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise UsageError(f"expected {str(folder)!r} to be a folder to write in: {error.strerror}") from error
        return 0, f"removed {count} from {folder}"
    return 0, f"{count} in {folder}"
