"""Which configs ``gemm`` runs with, and a tuner that times them on this device.

The backend chooses a config by a model of time or by measured thresholds. One can do better by
trying, once for a model and a kind of GPU::

    tuning = kernels.get_kernel("org/rocm-kernels", version=1).tuning
    tuning.tune_gemm(model, rows=(1, 16, 32), output="decode.json")  # minutes; then in force
    tuning.tune_gemm(model, rows=(128, 512, 2048), output="prefill.json")
    tuning.load_tuning("decode.json")                                # in a later process

or from a shell, where FOLDER is the package's (``os.path.dirname(package.__file__)``)::

    python FOLDER --shape 2304,16384 --shape 13312,16384 --rows 1,8,16,32 --output decode.json
    python FOLDER --shape 2304,16384 --rows 128,512,2048 --output prefill.json

With the environment variable ``ROCM_KERNELS_TUNING=decode.json:prefill.json`` the package loads the
files when it is imported. A file of another device, package version or schema is refused:
:func:`load_tuning` raises, an import warns, and nothing of the file is used.

A config is chosen for a class of M, the rows of a, never for one M: 1 to 16, and then classes that
end at powers of two. A row's bits stay independent of how many others there are within the classes
up to 64 rows. A call that the class's config cannot serve takes the backend's own choice, which
``gemm_config`` tells. The CPU has one config for given operands: there is nothing to choose, and
files made there hold times alone.

The file is a JSON object: ``schema``, ``package_version``, ``build``, ``device``, ``date`` (UTC),
``torch`` and ``entries``. An entry names its ``op`` and the op's key: ``m`` (the last of the
class), ``n``, ``k``, ``a_dtype``, ``w_dtype``, ``block_scales``; then come ``config``, ``default``
(the backend's choice), both in the backend's own words, and ``median_us``: for both, microseconds
by M.

products.py has what is a product's: its key, its data, its contract; gemm.py the configs. tuner.py
times and chooses, timing.py has the clock, files.py keeps the results, cli.py reads the command
line.
"""

from .cli import main
from .files import clear_tuning, load_tuning
from .gemm import gemm_candidates, gemm_with_config
from .products import GemmShape, shapes_of
from .tuner import tune_gemm

__all__ = [
    "GemmShape",
    "clear_tuning",
    "gemm_candidates",
    "gemm_with_config",
    "load_tuning",
    "main",
    "shapes_of",
    "tune_gemm",
]
