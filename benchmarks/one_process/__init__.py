"""Training of the sort recipe in one process, without a hub."""

import sys
from pathlib import Path

# As a run finds it: the code of a recipe lies beside it.
sys.path.append(str(Path(__file__).parents[2] / "recipes"))
