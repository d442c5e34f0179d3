"""Tables and sentences of the pages say what the saved results say: a number changed on one side
alone is noticed."""

import json
import random
import re
import sys
from pathlib import Path

import pytest
from project import ROOT

sys.path += [str(ROOT / "benchmarks"), str(ROOT / "simulator" / "calibration")]
import calibrate
import cpu
import gemm_schedules
import pages
import picture
import sentences
import tables

NAMES = [path.relative_to(ROOT).as_posix() for path in pages.pages()]
# Pages that a script makes whole. gemm_schedules's need a compiler: tests/test_benchmarks.py has
# them, and those of gpu_report.py, gemm.py, moe.py and moe_configs.py.
WHOLE = {
    "docs/cpu_benchmarks.md": lambda: cpu.document(json.loads(cpu.RESULTS.read_text())),
    "simulator/docs/calibration_table.md": lambda: calibrate.document(calibrate.saved()),
}
WHOLE_ELSEWHERE = {
    *(f"docs/{name}_gemm_schedules.md" for name in gemm_schedules.NAMES.values()),
    "docs/h200_benchmarks.md", "docs/h200_gemm.md", "docs/h200_moe.md", "docs/h200_moe_configs.md",
}  # fmt: skip


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


@pytest.mark.parametrize("name", NAMES)
def test_tables_are_what_the_results_say(name):
    text = text_of(name)
    assert text == pages.rendered(text), "run `python benchmarks/pages.py --write`"


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name):
    for target in re.findall(r"\]\((?!\w+:)([^)#]+)", text_of(name)):
        assert (ROOT / name).parent.joinpath(target).exists(), target


def anchors(text: str) -> set[str]:
    """Where a link may lead in a page, as GitHub names headings."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_to_headings(name):
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#]*)#([^)]+)\)", text_of(name)):
        page = (ROOT / name).parent / target if target else ROOT / name
        assert anchor in anchors(page.read_text()), f"{target}#{anchor}"


# What examples/add_kernel.patch adds, and what is built, is not there.
NOT_THERE = ("softcap", "build/")


@pytest.mark.parametrize("name", [n for n in NAMES if not n.endswith("_journal.md")])
def test_named_files_exist(name):
    """`folder/file` in a page, by patterns too."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    for file in re.findall(r"`([\w.-]+/[\w./*-]*)`", text_of(name)):
        if file.split("/")[0] in folders and not any(word in file for word in NOT_THERE):
            assert list(ROOT.glob(file.rstrip("/"))), file


def test_the_map_leads_to_files():
    """Each question of CONTRIBUTING.md's table has a file or folder, and a test."""
    (table,) = (rows for _, rows in pages.tables(text_of("CONTRIBUTING.md")))
    assert len(table) >= 10
    for question, where, test in table:
        for file in (re.search(r"`([^`]+)`", cell) for cell in (where, test)):
            assert file, question
            assert (ROOT / file[1]).exists(), f"{question}: {file[1]}"


# Read in ten minutes each: the maths, a drawing a backend, promises, a few numbers.
KERNELS = sorted(
    name for name in NAMES if name.startswith("docs/kernels/") and not name.endswith("_journal.md")
)
MOST_LINES = 180
PAGES = ("models", "layers", "checkpoints", "glossary", "decode", "recorded_steps")
SHORT = (*KERNELS, *(f"docs/{name}.md" for name in PAGES))
TIMED = re.compile(r"\d (?:us|ms|ns|TFLOP/s|GFLOPS|tokens/s|%)(?!\w)")


@pytest.mark.parametrize("name", SHORT)
def test_a_page_is_read_in_ten_minutes(name):
    lines = text_of(name).count("\n")
    assert lines <= MOST_LINES, "results go to docs/results, trials to a journal"


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernels_page_has_few_numbers(name):
    text = text_of(name)
    for heading in ("What it computes", "The numbers that matter", "How it is mapped",
                    "What bounds it", "Promises"):  # fmt: skip
        assert f"\n## {heading}\n" in text
    op = Path(name).stem
    assert [mark for _, mark, *_ in pages.BLOCK.findall(text)] == [f"{op}_numbers"]
    assert not TIMED.findall(pages.BLOCK.sub("", text)), "times are made of results: tables.py"


@pytest.mark.parametrize("name", WHOLE)
def test_page_is_what_the_results_say(name):
    assert text_of(name) == WHOLE[name]()


def test_pictures_are_what_the_results_say():
    for path, made in picture.pictures().items():
        assert path.read_text() == made, f"{path}: run `python benchmarks/picture.py`"


@pytest.mark.parametrize("name", sentences.SENTENCES)
def test_sentences_are_what_the_results_say(name):
    assert not sentences.missing(name, text_of(name))


@pytest.mark.parametrize("name", sorted({*NAMES} - {*WHOLE} - WHOLE_ELSEWHERE))
def test_no_table_of_results_is_typed_by_hand(name):
    """A table most of whose cells are numbers stands between marks."""
    text = text_of(name)
    lines = pages.typed_by_hand(text)
    assert not lines, f"{name} at lines {lines}: put it into benchmarks/results/tables"
    marks = re.findall(r"<!-- (results: |end of results)", text)
    assert marks == ["results: ", "end of results"] * (len(marks) // 2)


def test_every_table_of_results_is_in_a_page():
    shown = {mark for name in NAMES for _, mark, *_ in pages.BLOCK.findall(text_of(name))}
    shown |= {
        path.stem for path in picture.pictures() if any(path.name in text_of(n) for n in NAMES)
    }
    kept = {path.stem for path in (tables.RESULTS / "tables").glob("*.csv")}
    assert shown == kept | {*tables.TABLES, picture.PICTURE.stem}


@pytest.mark.parametrize("name", [n for n in NAMES if pages.BLOCK.search(text_of(n))])
def test_a_changed_number_is_noticed(name):
    """Of every number of every table that stands between marks, one after the other."""
    text = text_of(name)
    for block in pages.BLOCK.finditer(text):
        for number in re.finditer(r"\d+", block[3]):
            at = block.start(3) + number.start()
            other = random.choice([d for d in "0123456789" if d != text[at]])
            changed = text[:at] + other + text[at + 1 :]
            found = next(b for b in pages.BLOCK.finditer(changed) if b.start() == block.start())
            assert found[3] != pages.made(found[2]), number


@pytest.mark.parametrize("name", sentences.SENTENCES)
def test_a_changed_number_in_a_sentence_is_noticed(name):
    for sentence in sentences.SENTENCES[name]():
        numbers = list(re.finditer(r"\d", sentence))
        assert numbers, sentence
        words = " ".join(text_of(name).split())
        for digit in numbers:
            at = words.index(sentence) + digit.start()
            changed = words[:at] + str((int(digit[0]) + 1) % 10) + words[at + 1 :]
            assert sentence in sentences.missing(name, changed)


@pytest.mark.parametrize(
    ("row", "found"),
    [("| a | 1.5 us | - |", True), ("| a | up to 64 rows | 3 | yes |", False)],
)
def test_which_tables_hold_results(row, found):
    text = f"words\n\n| | x | y |\n| --- | --- | --- |\n{row}\n"
    assert pages.typed_by_hand(text) == ([3] if found else [])
    marked = text.replace("| | x", "<!-- results: t -->\n| | x") + "<!-- end of results -->\n"
    assert pages.typed_by_hand(marked) == []


def test_a_step_stands_beside_its_own_speed(monkeypatch):
    """Whatever the order in which ways were measured, it is that of the last column."""
    ways = {"use_decode_step, FP8 cache, FP8 head": ["7", "1.5", "0.1", "1.2"]}
    ways |= {"use_decode_step": ["5", "2.5", "0.1", "2.2"]}
    monkeypatch.setattr(tables, "by_case", lambda *_: {"a model": ways})
    assert tables.generate_h200().splitlines()[-1] == "| a model | | | 5 | | 7 | 1.5 | 1.2 |"
