"""`python -m jax_q4k`, and what the script `jax-q4k` runs: the command line of the models."""

import gc
import sys

gc.disable()  # what imports make stays: looking at it again and again takes a tenth of a second
from .models.cli import main  # noqa: E402

gc.freeze()
gc.enable()

if __name__ == "__main__":
    sys.exit(main())
