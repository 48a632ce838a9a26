"""`python -m evenkeel_moe` is the `evenkeel` command."""

from evenkeel_moe.cli import main

if __name__ == "__main__":
    main()
