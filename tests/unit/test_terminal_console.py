"""The reader of a search's output goes away: the search does not."""

import subprocess
import sys

from plait.terminal.console import LEFT

SEARCH = """
from plait.terminal.console import SearchConsole
console = SearchConsole()
input()
for step in range(3):
    console.print(f"step {step}")
print("the end", flush=True)
"""


def test_a_search_goes_on_when_nobody_reads_its_output() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SEARCH],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.close()
    assert process.stderr.read() == f"{LEFT}\n"
    process.stderr.close()
    assert process.wait() == 0
