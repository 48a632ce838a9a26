"""The newest step is read from the end of a file that a rank still writes."""

from evenkeel_moe.engines.reference.lines import LineWriter, newest_step


def test_the_newest_step_is_found_near_the_end_of_a_long_file(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    assert newest_step(path) is None
    writer = LineWriter(path, rank=0)
    writer.write("start", attempt=0)
    assert newest_step(path) is None
    for step in range(500):
        writer.write("step", step=step, tokens=256)
    writer.write("swap", epoch=1)
    writer.close()
    assert path.stat().st_size > 16_384
    assert newest_step(path) == 499
    with path.open("a") as file:
        file.write('{"kind":"step","step":5')  # The writer has not ended its line.
    assert newest_step(path) == 499


def test_a_step_far_before_the_end_is_not_looked_for(tmp_path):
    path = tmp_path / "rank-0.jsonl"
    path.write_text('{"kind":"step","step":1}\n' + "[1]\n" * 10_000)
    assert newest_step(path) is None
