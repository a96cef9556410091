from __future__ import annotations

import json
import math

import measured
from nfold.core.measurement import Epoch, RankSamples
from nfold.report.export import measurements_document


def test_the_object_has_its_version_its_machine_and_its_comparisons() -> None:
    one = measured.measurement(rate=1000)
    two = measured.measurement(rate=1800, devices=2)
    found = measurements_document([one, two])
    assert found["schema"] == 1
    assert found["machine"]["id"] == one.machine.id
    assert [m["id"] for m in found["measurements"]] == [one.id, two.id]
    (comparison,) = found["comparisons"]
    assert (comparison["baseline"], comparison["id"]) == (one.id, two.id)
    assert 1.7 < comparison["speedup"]["value"] < 1.9
    assert json.loads(json.dumps(found)) == found


def test_every_measurement_names_its_machine() -> None:
    made = [measured.measurement(), measured.measurement(measured.cpu_machine())]
    found = measurements_document(made)
    assert [m["machine"] for m in found["measurements"]] == list(found["machines"])
    assert found["machine"]["id"] == made[1].machine.id


def test_without_measurements_there_is_no_machine() -> None:
    assert measurements_document([])["machine"] is None


def test_what_is_not_a_number_is_null() -> None:
    epoch = Epoch(seconds=1.0, samples=10, train_loss=math.nan)
    ranks = (RankSamples(rank=0, device="cuda:0", epochs=(epoch,)),)
    found = measurements_document([measured.measurement(status="diverged", ranks=ranks)])
    assert found["measurements"][0]["epochs"][0]["train_loss"] is None
    json.dumps(found, allow_nan=False)
