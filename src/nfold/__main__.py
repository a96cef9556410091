"""``python -m nfold`` is ``nfold``."""

from nfold.cli import main

main()
