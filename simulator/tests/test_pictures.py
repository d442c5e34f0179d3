"""`profile --html` and `--trace`: self-contained, escaped, and true to the cycle model's report."""

import collections
import html.parser
import json
import re

import numpy as np
import pytest
from hipcc import device, device_file

import simulator
from simulator.cli import main

SOURCE = """
GLOBAL void work(f4* o, const u4* a) {  // "<b>" & </script> must come out as they are
  SHARED u4 x[256];
  x[TID] = a[BID * 256 + TID];
  sync();
  u4 y = x[TID ^ 128];
  f4 sum = {};
  u64 p = (u64)y.x << 32 | y.y, q = (u64)y.z << 32 | y.w;
  for (int n = 0; n < 4; ++n) {
    sum = __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(p, q, sum, 0, 0, 0);
  }
  o[BID * 256 + TID] = sum;
}
GLOBAL void stray(float* o) { o[TID] = 1; }
template <int n> __attribute__((global)) void of(float* o) { o[TID] = n; }
template __attribute__((global)) void of<3>(float*);
"""
GROUPS = 304 * 10
VOID = {"meta", "rect", "path"}


class Tree(html.parser.HTMLParser):
    """Fails on tags that do not match; keeps tags, attributes and text."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.text = [], collections.Counter(), []
        self.attributes = collections.defaultdict(list)
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        for name, value in attrs:
            self.attributes[name].append(value)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def aligned(words: int) -> np.ndarray:
    """On whole lines, as a GPU's memory is."""
    storage = np.empty(words + 1024, np.uint32)
    begin = -storage.ctypes.data % 4096 // 4
    return storage[begin : begin + words]


@pytest.fixture(scope="module")
def result():
    out, data = aligned(GROUPS * 1024), aligned(GROUPS * 1024)
    data[:] = np.random.default_rng(0).integers(0, 2**31, GROUPS * 1024, np.uint32)
    machine = simulator.machine_for("gfx942", traced=2)
    return device(SOURCE).launch("work", GROUPS, 256, [simulator.Out(out), data], cycles=machine)


@pytest.fixture(scope="module")
def page(result):
    return simulator.html_page(result)


def test_page_needs_nothing_beside_itself(page):
    tree = Tree(page)
    assert not {"src", "href", "xlink:href", "data"} & set(tree.attributes)
    assert not tree.tags["link"] and not tree.tags["img"]
    assert not re.search(r"https?:|url\(|@import|fetch\(|import\(", page)


def test_page_shows_every_part(page, result):
    text = " ".join(" ".join(Tree(page).text).split())
    for words in ("Where the cycles went", "One compute unit over time", "Memory", "Occupancy",
                  "Findings", "Source beside instructions", "modelled, not measured",
                  "None: no race", "Infinity Cache"):  # fmt: skip
        assert words in text
    for instruction in result.cycles.raw["code"]:
        assert instruction["text"] in text
    assert f"{result.cycles.seconds * 1e6:.2f} us" in text
    assert f"{result.cycles.spent['wait_memory']:.1%}" in text


def test_page_escapes_what_comes_from_files(page):
    tree = Tree(page)
    assert any('"<b>" & </script> must come out' in data for data in tree.text)
    assert tree.tags["script"] == 3 and tree.open == []  # two pictures' texts, and the script


def test_page_says_when_nothing_was_checked(result):
    code, out = device(SOURCE), np.zeros(64, np.float32)
    unchecked = code.launch("stray", 1, 64, [out], checks=False, cycles=True)
    assert "The checkers were off" in simulator.html_page(unchecked)
    found = code.launch("stray", 1, 64, [out[:32]], cycles=True)
    text = simulator.html_page(found)
    assert "out-of-bounds" in text and "None: no race" not in text
    assert "One compute unit over time" not in text
    with pytest.raises(ValueError, match="required a launch with cycles=True"):
        simulator.html_page(code.launch("stray", 1, 64, [out]))


def test_memory_levels_agree_with_what_a_kernel_moves(result):
    memory, moved = result.cycles.raw["memory"], GROUPS * 4096
    assert memory["l2_read_bytes"] == pytest.approx(moved, rel=0.01)  # and the arguments
    assert memory["l2_written_bytes"] == memory["write_bytes"] == moved
    assert memory["fetch_bytes"] == pytest.approx(moved, rel=0.01)


def test_trace_has_every_wave_and_operation(result):
    trace, raw = json.loads(simulator.chrome_trace(result)), result.cycles.raw
    events = trace["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    slices = collections.defaultdict(list)
    for e in events:
        if e["ph"] == "X":
            slices[lanes[e["pid"], e["tid"]].split()[-1], e["pid"]].append(e)
    groups = {wave[3] for wave in raw["trace"]["waves"]}
    assert {e["pid"] for e in events} == {1, 2}
    matrix = [e for key, all_ in slices.items() if key[0] == "MFMA" for e in all_]
    assert len(matrix) == len(groups) * 4 * 4
    assert all(e["dur"] == pytest.approx(16 / 2100, abs=0.0011) for e in matrix)
    starts = [e["name"] for e in events if e["ph"] == "b"]
    assert starts.count("global_load_dwordx4") == starts.count("global_store_dwordx4")
    assert len(starts) == len(groups) * 4 * 2 == sum(e["ph"] == "e" for e in events)
    names = collections.Counter(e["name"] for e in events if e["ph"] == "X")
    assert sum(n for name, n in names.items() if name.startswith("workgroup")) == len(groups) * 4
    assert names["barrier"] and names["wait for memory"]


def test_trace_slices_lie_within_each_other_or_apart(result):
    lanes = collections.defaultdict(list)
    for e in json.loads(simulator.chrome_trace(result))["traceEvents"]:
        if e["ph"] == "X":
            # Whole nanoseconds.
            begin, length = round(e["ts"] * 1000), round(e["dur"] * 1000)
            assert length >= 0
            lanes[e["pid"], e["tid"]].append((begin, -(begin + length)))
    for spans in lanes.values():
        open_until = []
        for begin, end in sorted(spans):
            while open_until and open_until[-1] <= begin:
                open_until.pop()
            assert not open_until or -end <= open_until[-1]
            open_until.append(-end)


def test_command_line_writes_both(tmp_path, capsys):
    names = {kind: tmp_path / f"of.{kind}" for kind in ("html", "trace")}
    command = ["profile", str(device_file(SOURCE)), "_Z2ofILi3EEvPf", "--grid", "1", "--block",
               "64", f"out:{tmp_path}/o.npy:64:float32", "--html", str(names["html"]),
               "--trace", str(names["trace"])]  # fmt: skip
    assert main(command) == 0
    assert "cycle model:" in capsys.readouterr().out
    assert "void of&lt;3&gt;(float*)" in names["html"].read_text()
    assert json.loads(names["trace"].read_text())["otherData"]["kernel"] == "void of<3>(float*)"
    untraced = device(SOURCE).launch("stray", 1, 64, [np.zeros(64, np.float32)], cycles=True)
    with pytest.raises(ValueError, match="traced=N"):
        simulator.chrome_trace(untraced)
