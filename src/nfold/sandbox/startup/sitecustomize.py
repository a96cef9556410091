"""Run by every Python process that a script starts: it enters the script's sandbox, too.

Its folder is the first in PYTHONPATH. The ``sitecustomize`` of the user is run afterwards.
"""

import importlib
import os
import sys

STARTUP = os.path.dirname(os.path.abspath(__file__))


def _enter() -> None:
    root = os.path.dirname(os.path.dirname(os.path.dirname(STARTUP)))
    sys.path.insert(0, root)  # the same nfold as in the rank
    try:
        from nfold.sandbox.sandbox import join_sandbox

        join_sandbox()
    except Exception as error:  # such as another version of Python without nfold
        sys.stderr.write(f"nfold: a process is not in the sandbox of its script: {error}\n")
    finally:
        sys.path.remove(root)


def _run_next() -> None:
    own = sys.modules.pop(__name__)
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != STARTUP]
    try:
        importlib.import_module(__name__)
    except ImportError:
        pass
    finally:
        sys.modules.setdefault(__name__, own)


_enter()
_run_next()
