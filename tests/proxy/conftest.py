import sys
from pathlib import Path

# The simulation is a set of modules of its own, which other folders' tests may use too.
sys.path.insert(0, str(Path(__file__).parents[1] / "simulation"))
