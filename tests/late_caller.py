"""A caller for test_callers.py, each process of which is ready at another time."""

import json
import sys
import time
from pathlib import Path

from benchmarks.callers import window


def main() -> None:
    """Reads {folder, seconds} from stdin; prints when it was ready, and its window's begin and end."""
    given = json.loads(sys.stdin.readline())
    number = 0
    while True:  # the first number that no other caller has taken
        try:
            (Path(given["folder"]) / str(number)).touch(exist_ok=False)
            break
        except FileExistsError:
            number += 1
    time.sleep(0.3 * number)
    ready = time.perf_counter()
    print(json.dumps([ready, *window(given["seconds"])]))


if __name__ == "__main__":
    main()
