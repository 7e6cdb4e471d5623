"""Where the program begins: `meshswarm`, and `python -m meshswarm`.

The rule this file keeps: the commands are imported within reach of the `except`, so that Ctrl-C a moment after the
start is no traceback either.
"""

import sys


def main() -> None:
    try:
        from meshswarm.cli import main as run_command

        run_command()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
