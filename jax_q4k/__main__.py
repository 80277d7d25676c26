"""Command line of the models: `python -m jax_q4k`, which the script `jax-q4k` also runs."""

import gc
import sys

gc.disable()  # imported objects stay; scanning them again and again takes a tenth of a second
from .models.cli import main  # noqa: E402

gc.freeze()
gc.enable()

if __name__ == "__main__":
    sys.exit(main())
