"""``python FOLDER --help``: the tuner (tuning/cli.py), where FOLDER is this file's."""

import importlib.util
import sys
from pathlib import Path

if __package__:
    from .tuning import main
else:  # run as a folder: no parent package yet
    _file = Path(__file__).resolve().parent / "__init__.py"
    _spec = importlib.util.spec_from_file_location("rocm_kernels", _file)
    _package = importlib.util.module_from_spec(_spec)
    sys.modules["rocm_kernels"] = _package
    _spec.loader.exec_module(_package)
    main = _package.tuning.main

if __name__ == "__main__":
    sys.exit(main())
