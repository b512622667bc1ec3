import math

from thinpipe.launch.view.terminal.progress import Sparkline


def test_sparkline_falls_from_high_to_low_and_never_outgrows_its_cells() -> None:
    line = Sparkline(8)
    assert str(line) == ""
    for value in range(1000, 0, -1):
        line.add(float(value))
        line.add(math.nan)
        assert len(str(line)) <= 8
    text = str(line)
    assert (text[0], text[-1]) == ("█", "▁")
    assert list(text) == sorted(text, reverse=True)
