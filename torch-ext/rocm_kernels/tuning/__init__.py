"""Which config :func:`skinny_gemm` runs with, and a tuner that times them all on this device.

The backend chooses a config by a model of time (AMD) or by measured thresholds (CUDA, CPU). On an
AMD GPU one can do better by trying, once for a model and a kind of GPU::

    tuning = kernels.get_kernel("org/rocm-kernels", version=1).tuning
    tuning.tune_skinny_gemm(model, output="mi300x.json")    # minutes; in force from here on
    tuning.load_tuning("mi300x.json")                       # in a later process

or from a shell, where FOLDER is the package's (``os.path.dirname(package.__file__)``)::

    python FOLDER --shape 2304,16384 --shape 13312,16384 --rows 1,8,16,32 --output mi300x.json

With the environment variable ``ROCM_KERNELS_TUNING=mi300x.json`` the package loads the file when it
is imported. A file of another device, package version or schema is refused: :func:`load_tuning`
raises, an import warns, and nothing of the file is used.

A config is chosen for a class of M, the rows of a (1 to 16, 17 to 32, 33 to 64), never for one M,
so a row's bits stay independent of how many others there are within the class. The CPU and CUDA
backends have one config for given operands: there is nothing to choose, and files made there hold
times alone.

The file is a JSON object: ``schema``, ``package_version``, ``build``, ``device``, ``date`` (UTC),
``torch`` and ``entries``. An entry names its ``op`` (today skinny_gemm alone has a tuner) and the
op's key: ``m`` (the last of the class), ``n``, ``k``, ``a_dtype``, ``w_dtype``, ``block_scales``;
then come ``config``, ``default`` (the backend's choice), both in the backend's own words, and
``median_us``: for both, microseconds by M.

skinny_gemm.py has what is this op's: its key, its candidates, its contract. tuner.py times and
chooses, timing.py has the clock, files.py keeps the results, cli.py reads the command line.
"""

from .cli import main
from .files import clear_tuning, load_tuning
from .skinny_gemm import (
    GemmShape,
    candidates,
    shapes_of,
    skinny_gemm_config,
    skinny_gemm_with_config,
)
from .tuner import tune_skinny_gemm

__all__ = [
    "GemmShape",
    "candidates",
    "clear_tuning",
    "load_tuning",
    "main",
    "shapes_of",
    "skinny_gemm_config",
    "skinny_gemm_with_config",
    "tune_skinny_gemm",
]
