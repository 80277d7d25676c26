"""`python -m jax_q4k`: the command line, which belongs to the models."""

import gc
import sys

gc.disable()  # what imports make stays: looking at it again and again takes a tenth of a second
from .models.cli import main  # noqa: E402

gc.freeze()
gc.enable()

sys.exit(main())
