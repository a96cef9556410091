from __future__ import annotations

from pathlib import Path

import measured
from nfold.analysis import sections
from nfold.core.measurement import FailureCause
from nfold.report import export


def test_the_document_has_headline_table_and_notes(training: Path) -> None:
    text = export.report_markdown(sections.group_sections(sections.load_measurements(training)))
    assert text.startswith("## cnn10 on 4 × NVIDIA H200")
    assert "**4 devices are 3." in text
    assert "| layout | batch | devices | strategy |" in text
    assert "hung" in text
    assert "GPU 2 was held back by its temperature" in text


def test_parts_have_a_table_of_their_own(mixed: Path) -> None:
    text = export.report_markdown(
        sections.group_sections(sections.load_measurements(mixed, "conv2d"))
    )
    assert "| part \\[ms\\] | 1 device | 2 devices | 4 devices |" in text


def test_every_row_of_a_table_has_the_same_cells() -> None:
    text = export.pipe_table(["a", "b"], [["1|2", "x\ny"], ["<b>", "*c*"]])
    lines = text.splitlines()
    assert len(lines) == 4
    assert {line.replace("\\|", "").count("|") for line in lines} == {3}


def test_hostile_text_is_inert() -> None:
    cause = FailureCause(text="</script>\x1b[31m\n# title\n[x](http://a) `code` **b**")
    failed = measured.measurement(status="crashed", cause=cause, ranks=())
    text = export.report_markdown(sections.group_sections([failed]))
    assert "\x1b" not in text
    assert "\\</script\\>" in text
    assert "\\[x\\]" in text
    assert "\n# title" not in text
