"""Which configs ``skinny_gemm`` and ``gemm`` run with, and a tuner that times them on this device.

The backend chooses a config by a model of time or by measured thresholds. One can do better by
trying, once for a model and a kind of GPU::

    tuning = kernels.get_kernel("org/rocm-kernels", version=1).tuning
    tuning.tune_skinny_gemm(model, output="decode.json")    # minutes; in force from here on
    tuning.tune_gemm(model, output="prefill.json")
    tuning.load_tuning("decode.json")                       # in a later process

or from a shell, where FOLDER is the package's (``os.path.dirname(package.__file__)``)::

    python FOLDER --shape 2304,16384 --shape 13312,16384 --rows 1,8,16,32 --output decode.json
    python FOLDER --op gemm --shape 2304,16384 --rows 128,512,2048 --output prefill.json

With the environment variable ``ROCM_KERNELS_TUNING=decode.json:prefill.json`` the package loads the
files when it is imported. A file of another device, package version or schema is refused:
:func:`load_tuning` raises, an import warns, and nothing of the file is used.

A config is chosen for a class of M, the rows of a, never for one M. skinny_gemm's are 1 to 16, 17
to 32 and 33 to 64, and a row's bits stay independent of how many others there are within the class.
gemm's end at powers of two; a call that the class's config cannot serve takes the backend's own
choice, which ``gemm_config`` tells. The CPU has one config for given operands, and so has
skinny_gemm on CUDA: there is nothing to choose, and files made there hold times alone.

The file is a JSON object: ``schema``, ``package_version``, ``build``, ``device``, ``date`` (UTC),
``torch`` and ``entries``. An entry names its ``op`` and the op's key: ``m`` (the last of the
class), ``n``, ``k``, ``a_dtype``, ``w_dtype``, ``block_scales``; then come ``config``, ``default``
(the backend's choice), both in the backend's own words, and ``median_us``: for both, microseconds
by M.

products.py has what is a product's: its key, its data, its contract; skinny_gemm.py and gemm.py
the configs of each. tuner.py times and chooses, timing.py has the clock, files.py keeps the
results, cli.py reads the command line.
"""

from .cli import main
from .files import clear_tuning, load_tuning
from .gemm import gemm_candidates, gemm_with_config
from .products import GemmShape, shapes_of
from .skinny_gemm import candidates, skinny_gemm_config, skinny_gemm_with_config
from .tuner import tune_gemm, tune_skinny_gemm

__all__ = [
    "GemmShape",
    "candidates",
    "clear_tuning",
    "gemm_candidates",
    "gemm_with_config",
    "load_tuning",
    "main",
    "shapes_of",
    "skinny_gemm_config",
    "skinny_gemm_with_config",
    "tune_gemm",
    "tune_skinny_gemm",
]
