"""`python -m stowax` is the `stowax` command, and `stowax` is this.

An interrupt while modules are imported, or after a command is done, ends the process as
it ends any program, without a traceback. While one runs, `_cli._interrupts` has it.
"""

import signal


def main() -> None:
    """Runs the command line, and ends the process."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ._cli._cli import main as run
    from ._cli._interrupts import INTERRUPTED, ended_by_an_interrupt

    try:
        run()
    except SystemExit as ended:
        if ended.code == INTERRUPTED:
            ended_by_an_interrupt()
        raise


if __name__ == "__main__":
    main()
