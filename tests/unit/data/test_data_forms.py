from __future__ import annotations

from nfold.data.forms import DownloadFile


def test_a_download_is_named_after_its_address() -> None:
    address = "https://example.org/~data/mnist/t10k.gz"
    assert DownloadFile(url=address, size_bytes=1, sha256="").name == "t10k.gz"
