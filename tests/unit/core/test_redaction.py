from __future__ import annotations

import pytest

from nfold.core import redaction


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--wandb-key=abc", "--wandb-key=***"),
        ("--api-token abc --lr 0.1", "--api-token *** --lr 0.1"),
        ("-password 1234", "-password ***"),
        ("--hubToken abc", "--hubToken ***"),
        ("--HF_TOKEN=abc", "--HF_TOKEN=***"),
        ("--auth --epochs 3", "--auth --epochs 3"),
        ("+logger.api_key=a=b", "+logger.api_key=***"),
        ("logger={api_key:abc,name:run}", "logger={api_key:***,name:run}"),
        ("--db=postgres://bob:pass@host/db", "--db=postgres://***@host/db"),
        ("--url http://host/?token=abc&n=1", "--url http://host/?token=***&n=1"),
        ("--monkey=3 --keyboard us", "--monkey=3 --keyboard us"),
        ("--num-keys 8 --max-tokens=512", "--num-keys 8 --max-tokens=512"),
        ("--key-dim 64 --num_key_value_heads=8", "--key-dim 64 --num_key_value_heads=8"),
        ("--key-dim abc", "--key-dim ***"),
        ("--tokenizer gpt2 --author bob", "--tokenizer gpt2 --author bob"),
    ],
)
def test_secrets_in_arguments_are_hidden(arguments: str, expected: str) -> None:
    assert redaction.redact_arguments(arguments.split()) == tuple(expected.split())
    assert redaction.redact_text(arguments) == expected
    assert redaction.redact_text(expected) == expected


def test_secrets_in_variables_are_hidden() -> None:
    variables = {
        "NCCL_PLUGIN_TOKEN": "abc",
        "TORCH_HUB_TOKEN": "1",
        "TORCH_PROXY": "http://bob:pass@proxy",
        "NCCL_ALGO": "Ring",
    }
    assert redaction.redact_variables(variables) == {
        "NCCL_PLUGIN_TOKEN": "***",
        "TORCH_HUB_TOKEN": "***",
        "TORCH_PROXY": "http://***@proxy",
        "NCCL_ALGO": "Ring",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/home/alice/train.py", "~/train.py"),
        ("--data=/home/alice", "--data=~"),
        ("'/home/alice/my data' failed", "'~/my data' failed"),
        ("file:///home/alice/x", "file://~/x"),
        ("/home/alice2/x", "/home/alice2/x"),
        ("/mnt/home/alice/x", "/mnt/home/alice/x"),
    ],
)
def test_the_home_folder_is_abbreviated(text: str, expected: str) -> None:
    assert redaction.abbreviate_home(text) == expected
    assert redaction.expand_home(expected) == text
