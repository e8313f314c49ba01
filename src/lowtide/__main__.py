"""`python -m lowtide` is `lowtide`."""

from lowtide.cli import main

if __name__ == "__main__":
    main(prog_name="lowtide")
