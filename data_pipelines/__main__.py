"""python -m data_pipelines prepare | show"""

import sys


def main(arguments: list[str]) -> int:
    """Run a command; 0, or 2 after one line about what to put right."""
    from rich.console import Console

    from data_pipelines.errors import UserError

    try:
        return run(arguments, Console())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 130


def run(arguments: list[str], console) -> int:
    from data_pipelines.errors import UserError

    command, *rest = arguments or ["--help"]
    if command in ("-h", "--help"):
        console.print(__doc__, "Add --help after a command for its options.", markup=False)
        return 0
    if command == "prepare":
        from data_pipelines.prepare import Prepare, prepare

        prepare(parse(Prepare, rest, "prepare"), console)
        return 0
    raise UserError(f"unknown command {command!r}; use prepare or show")


def parse(options: type, arguments: list[str], command: str):
    import tyro
    return tyro.cli(options, args=arguments, prog=f"python -m data_pipelines {command}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
