"""`python -m evenkeel_moe` is the `evenkeel` command."""


def main() -> None:
    """Run the command.

    Planner processes import this module too, as the main one of their parent, and need no command
    line. So it is imported here.
    """
    from evenkeel_moe.cli import main as run

    run()


if __name__ == "__main__":
    main()
