"""The guide's example runs as it stands."""

import re
from pathlib import Path

GUIDE = Path(__file__).parents[3] / "docs" / "store.md"


def test_the_example_of_the_guide_runs(store, capsys):
    store.node()
    (example,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)
    exec(compile(example.replace("127.0.0.1:7411", store.address), str(GUIDE), "exec"), {})
    shown = capsys.readouterr().out
    assert "status='stored'" in shown
    assert "remove it first" in shown
    assert "there is no object 'model/layer-1'" in shown
    assert "['model/layer-0'] [True, False]" in shown
