"""The `stowax` command, its subcommands and its demo."""
