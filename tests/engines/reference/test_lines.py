"""Lines are read from a file that a rank still writes."""

from evenkeel_moe.engines.reference.lines import LineWriter, read_lines, read_new_lines


def test_new_lines_are_read_once_and_whole(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    read: dict = {}
    assert list(read_new_lines(tmp_path, read)) == []
    writer = LineWriter(path, rank=0)
    writer.write("start", attempt=0)
    writer.write("step", step=1)
    assert [line["kind"] for line in read_new_lines(tmp_path, read)] == ["start", "step"]
    with path.open("a") as file:
        file.write('{"kind":"step","step":5')  # The writer has not ended its line.
    assert list(read_new_lines(tmp_path, read)) == []
    with path.open("a") as file:
        file.write("}\n")
    assert list(read_new_lines(tmp_path, read)) == [{"kind": "step", "step": 5}]
    writer.close()


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    path.write_text('{"kind":"step"{"kind":"start"}\n{"kind":"exit"}\n')
    assert read_lines(path) == list(read_new_lines(tmp_path, {})) == [{"kind": "exit"}]


def test_a_writer_after_a_crash_begins_a_line_of_its_own(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    path.write_text('{"kind":"step","step":1}\n{"kind":"st')
    writer = LineWriter(path)
    writer.write("start")
    writer.close()
    assert [line["kind"] for line in read_lines(path)] == ["step", "start"]
