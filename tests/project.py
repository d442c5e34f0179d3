"""Where the project lies, and what it is called on the Hub."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPO_ID = "org/rocm-kernels"
