"""`python -m evenkeel` is the `evenkeel` command."""

from evenkeel.cli import main

if __name__ == "__main__":
    main()
