"""`python -m jax_q4k`: the command line, which belongs to the models."""

import sys

from .models.cli import main

sys.exit(main())
