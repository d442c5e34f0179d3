"""The simulator is imported from this checkout, wherever pytest is started."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))
