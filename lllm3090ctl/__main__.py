"""Entry point of ``lllm3090ctl``."""

from __future__ import annotations

import io
import sys

INTERRUPTED = 130
NAMES = "--names"


def main() -> int:
    """Run the command line; returns or raises SystemExit with the exit status."""
    try:
        if sys.argv[1:2] == [
            NAMES
        ]:  # a shell that completes a word: at each press of a key, so without the rest
            from lllm3090ctl import names  # noqa: PLC0415

            return names.main(sys.argv[2:])
        from lllm3090ctl.cli import cli  # noqa: PLC0415 - Ctrl-C while modules are read must not end in a traceback

        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                # What the terminal's encoding cannot show is written as an escape instead of failing.
                stream.reconfigure(errors="backslashreplace")
        cli.main()
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
